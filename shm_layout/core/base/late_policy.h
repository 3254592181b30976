/* late_policy.h - the stored form of late policies. */
#ifndef PURGATORYD_BASE_LATE_POLICY_H
#define PURGATORYD_BASE_LATE_POLICY_H

#include "core/base/common.h"

/* Return the stored form of a late policy, and its parts. */
static inline uint64_t late_setting(unsigned policy, int64_t grace_ns)
{
    return (uint64_t)grace_ns << PG_LATE_SHIFT | policy;
}
static inline unsigned late_policy(uint64_t late) { return late & ((1u << PG_LATE_SHIFT) - 1); }
static inline int64_t late_grace_ns(uint64_t late) { return (int64_t)(late >> PG_LATE_SHIFT); }
/* Return whether a late policy is in bounds. */
static inline bool late_sound(unsigned policy, int64_t grace_ns)
{
    if (policy == PG_LATE_FIRE)
        return grace_ns == 0;
    return policy < PG_LATE_POLICIES && grace_ns >= PG_LATE_GRACE_MIN_NS &&
           grace_ns <= PG_LATE_GRACE_MAX_NS;
}

#endif
