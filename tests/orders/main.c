/* main.c - explores each scenario with the unchanged code, and then with each memory order
 * weakened. Prints a line for each exploration: scenario, weakening, place (a code address), number
 * of executions, and the fault that was found or "-". tests/test_orders.py reads these lines and
 * resolves the places. */
#include <stdio.h>
#include <string.h>

#include "scenarios.h"

enum { MUTATIONS_MAX = 512 };

static const struct scenario *const scenarios[] = {
    &slot_scenario, &check_scenario, &parked_scenario, &replay_scenario, &gap_scenario,
    &sleep_topic_scenario, &sleep_namespace_scenario, &sleep_name_scenario,
    &topic_scenario, &operation_scenario, &outcome_scenario, &acknowledged_scenario,
    &moved_scenario, &moved_notice_scenario, &moved_snapshot_scenario, &moved_entry_scenario,
    &moved_outcome_scenario, &snapshot_scenario, &watermark_scenario, &settings_scenario,
    &birth_scenario, &unique_scenario, &group_scenario, &reuse_scenario, &unasked_scenario, &stopped_scenario,
    &ring_scenario, &ring_space_scenario, &ring_half_scenario, &ring_large_scenario,
    &ring_recall_scenario};

static const char *const weakenings[] = {[INTACT] = "intact", [NO_RELEASE] = "no release",
                                         [NO_ACQUIRE] = "no acquire", [NO_FENCE] = "no fence",
                                         [NO_LOOK] = "no second look"};

/* Explores a scenario, prints the result, and returns whether a fault was found. */
static bool report(const struct scenario *s, struct mutation m)
{
    const struct outcome o = model_explore(s, m);
    printf("%s\t%s\t%#lx\t%lu\t%s\n", s->name, weakenings[m.kind], (unsigned long)m.place,
           (unsigned long)o.executions, o.fault != NULL ? o.fault : "-");
    fflush(stdout);
    return o.fault != NULL;
}

int main(int count, char **names)
{
    struct mutation mutations[MUTATIONS_MAX];
    for (uint32_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++) {
        if (count > 1 && strcmp(names[1], scenarios[i]->name) != 0)
            continue;
        if (report(scenarios[i], (struct mutation){INTACT, 0}))
            continue;
        const uint32_t found = model_mutations(mutations, MUTATIONS_MAX);
        for (uint32_t n = 0; n < found; n++)
            report(scenarios[i], mutations[n]);
    }
    return 0;
}
