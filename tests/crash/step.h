/* step.h - runs a function and stops wherever a kill can hit: step.c after each instruction,
 * stores.c before each store. */
#ifndef PURGATORYD_STEP_H
#define PURGATORYD_STEP_H

#include <stdint.h>

/* Calls run(context), and seen(context) at each of the places. Returns how many there were;
 * 0 = this machine cannot. */
uint64_t step_run(void (*run)(void *), void (*seen)(void *), void *context);

#endif
