/* scenarios.h - the scenarios that main.c explores. Each runs product functions in two threads, and
 * checks the result. */
#ifndef PURGATORYD_SCENARIOS_H
#define PURGATORYD_SCENARIOS_H

#include "model.h"

/* readers.c: a daemon that changes the arena, and a process that reads it. */
extern const struct scenario slot_scenario, check_scenario, parked_scenario, replay_scenario,
    gap_scenario, sleep_topic_scenario, sleep_namespace_scenario, sleep_name_scenario,
    topic_scenario, operation_scenario, outcome_scenario, acknowledged_scenario,
    moved_scenario, moved_notice_scenario, moved_snapshot_scenario, moved_entry_scenario,
    moved_outcome_scenario, snapshot_scenario, watermark_scenario, settings_scenario,
    birth_scenario, unique_scenario;
/* rings.c: a client and the daemon at the two sides of a ring. */
extern const struct scenario ring_scenario, ring_space_scenario, ring_half_scenario,
    ring_large_scenario, ring_recall_scenario;
/* wal.c: the loop and the group-commit thread. */
extern const struct scenario group_scenario, reuse_scenario, unasked_scenario, stopped_scenario;

/* futex.c: watches the kernel's memory for the words on which the second thread sleeps. Called by the
 * setup of a scenario. */
void futex_watch(uint32_t *const *words, uint32_t count);

#endif
