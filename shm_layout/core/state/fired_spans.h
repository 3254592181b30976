/* fired_spans.h - nominal times of the occurrences that have fired or may have fired. */
#ifndef PURGATORYD_STATE_FIRED_SPANS_H
#define PURGATORYD_STATE_FIRED_SPANS_H

#include "core/base/common.h"

/* Return whether the occurrence with this nominal time counts as fired. */
bool spans_have(const struct pg_schedule_fields *f, int64_t nominal_ns);
/* Count the occurrences from one nominal time to another as fired. */
void spans_add(struct pg_schedule_fields *f, int64_t first_ns, int64_t last_ns);
/* Count an occurrence as not fired. `before_ns`: nominal time of the occurrence before it. */
void spans_remove(struct pg_schedule_fields *f, int64_t nominal_ns, int64_t before_ns);
/* Return whether the spans of untrusted fields are sorted, apart, and not too many. */
bool spans_sound(const struct pg_schedule_fields *f);

#endif
