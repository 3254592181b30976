/* step.h - runs a function instruction by instruction, through the processor's trap flag. */
#ifndef PURGATORYD_STEP_H
#define PURGATORYD_STEP_H

#include <stdint.h>

/* Calls run(context), and seen(context) after each of its instructions: between two of them
 * is where a kill can hit. Returns how many instructions there were; 0 = this machine cannot. */
uint64_t step_run(void (*run)(void *), void (*seen)(void *), void *context);

#endif
