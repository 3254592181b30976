/* futex.h - wake processes that sleep on a word of shared memory. */
#ifndef PURGATORYD_BASE_FUTEX_H
#define PURGATORYD_BASE_FUTEX_H

#include <stdint.h>

/* Wake all threads of all processes that sleep on the word. */
void futex_wake(uint32_t *word);

#endif
