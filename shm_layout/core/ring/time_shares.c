/* time_shares.c - the CPU time of each uid in an iteration of the loop. */

#include "core/base/common.h"

void pg_time_shares_begin(struct pg_time_shares *s, int64_t boot_ns)
{
    s->iteration++;
    s->apply = boot_ns < s->until_boot_ns;
}

int pg_time_share_used(const struct pg_time_shares *s, const struct pg_time_share *one)
{
    return s->apply && one->iteration == s->iteration && one->spent_ns >= s->most_ns;
}

void pg_time_share_charge(struct pg_time_shares *s, struct pg_time_share *one,
                          int64_t begun_boot_ns, int64_t ended_boot_ns)
{
    if (one->iteration != s->iteration) {
        one->iteration = s->iteration;
        one->spent_ns = 0;
    }
    one->spent_ns += ended_boot_ns - begun_boot_ns;
    if (s->charged && one->uid != s->last_uid)
        s->until_boot_ns = ended_boot_ns + s->lasts_ns;
    s->last_uid = one->uid;
    s->charged = true;
}
