/* step.c - run a function in single steps on x86-64. The trap flag raises SIGTRAP after every
 * instruction; the signal handler runs without the flag. The function makes no system call, so
 * SIGTRAP is raised for every instruction. */
#define _GNU_SOURCE                /* defined for the names of registers */
#include "step.h"

#include <signal.h>
#include <stddef.h>
#include <ucontext.h>

static void (*each)(void *);
static void *each_context;
static volatile sig_atomic_t stepping;
static uint64_t steps;

#ifdef __x86_64__

#define TRAP_FLAG 0x100

static void trapped(int signal_number, siginfo_t *info, void *interrupted)
{
    ucontext_t *u = interrupted;
    (void)signal_number;
    (void)info;
    if (!stepping) {
        u->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
        return;
    }
    u->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
    steps++;
    each(each_context);
}

uint64_t step_run(void (*run)(void *), void (*seen)(void *), void *context)
{
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &action, NULL);
    each = seen;
    each_context = context;
    steps = 0;
    stepping = 1;
    raise(SIGTRAP);               /* the handler sets the trap flag, and raise returns */
    run(context);
    stepping = 0;
    return steps;
}

#else

uint64_t step_run(void (*run)(void *), void (*seen)(void *), void *context)
{
    (void)run;
    (void)seen;
    (void)context;
    return 0;
}

#endif
