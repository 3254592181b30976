/* step.h - run a function and stop at each point where a kill can make a difference. step.c stops
 * after each instruction, stores.c before each store. */
#ifndef PURGATORYD_STEP_H
#define PURGATORYD_STEP_H

#include <stdint.h>

/* Run run(context), and call seen(context) at each stop. Return the number of stops; 0 = this
 * machine cannot step. */
uint64_t step_run(void (*run)(void *), void (*seen)(void *), void *context);

#endif
