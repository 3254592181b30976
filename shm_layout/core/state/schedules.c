/* schedules.c - schedules: named objects that arm one timer after another.
 *
 * An occurrence is an ordinary timer with the item PG_EXT_SCHEDULE, which names the row of the
 * schedule and the nominal time. At most one occurrence of a schedule is armed. Its row has the time
 * of the occurrence that follows before the armed occurrence fires, so the next one is armed in the
 * same step without a calendar. Only the daemon computes the times of cron expressions; it then
 * answers the questions that the rows ask.
 *
 * The control word of its slot arms an occurrence; after that the row moves on to it. A kill between
 * the two stores leaves an armed occurrence that is newer than its row, and schedules_settle() lets
 * the row move on. A kill after an occurrence has fired leaves a row without an armed occurrence,
 * which arms the next one. If a row changes so that its armed occurrence is void, the new fields
 * have a higher `since_ticket` than the occurrence, and schedules_settle() frees its slot. */

#include "core/state/schedules.h"
#include "core/base/answer.h"
#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/hash.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/compaction.h"
#include "core/state/fired_spans.h"
#include "core/state/jobs.h"
#include "core/state/lateness.h"
#include "core/state/names.h"
#include "core/state/quotas.h"
#include "core/state/records.h"
#include "core/state/replay_buffer.h"
#include "core/state/rows.h"
#include "core/state/schedule_rows.h"
#include "core/state/timers.h"

#define SECOND_NS 1000000000
#define LOOKED_AT 64              /* schedules among which the earliest occurrence is armed first */

/* ---- times --------------------------------------------------------------------------------- */

/* Return a + b, limited to the times between the two constants. */
static int64_t time_plus(int64_t a, int64_t b)
{
    int64_t sum;
    if (!__builtin_add_overflow(a, b, &sum))
        return sum;
    return b > 0 ? PG_NOMINAL_NONE : PG_NOMINAL_UNKNOWN + 1;
}

int64_t schedule_wall_ns(const struct pg_arena *a)
{
    return time_plus(a->call.moment_ns, a->header->wall_offset_ns);
}

/* Return `nominal_ns`, or NONE if the schedule has no occurrence at this time. */
static int64_t limited(const struct pg_schedule_fields *f, int64_t nominal_ns)
{
    const bool over = nominal_is_known(nominal_ns) &&
                      (nominal_ns > f->until_ns || (f->count != 0 && f->armed >= f->count));
    return over ? PG_NOMINAL_NONE : nominal_ns;
}

/* Return the time of the occurrence that follows after a delay which has not begun. */
static int64_t after_delay(const struct pg_schedule_fields *f)
{
    return limited(f, f->nominal_ns) == PG_NOMINAL_NONE ? PG_NOMINAL_NONE : PG_NOMINAL_UNKNOWN;
}

/* Return by how much the occurrence after the newest one is later than its nominal time. */
static int64_t jitter_of(const struct pg_arena *a, uint32_t row)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    int64_t most_ns = f->jitter_ns;
    const int64_t gap_ns = f->every_ns != 0               ? f->every_ns
                           : f->then_ns == PG_NOMINAL_NONE ? INT64_MAX
                                                           : f->then_ns - f->after_ns;
    if (most_ns >= gap_ns)
        most_ns = gap_ns - 1;
    if (most_ns <= 0)
        return 0;
    const uint64_t hash = keyed_hash(a->secret->secret, schedule_at(a, row)->hash, &f->after_ns,
                                     sizeof f->after_ns);
    return (int64_t)(hash % ((uint64_t)most_ns + 1));
}

uint32_t schedule_steps(const struct pg_schedule_fields *f, int64_t from_ns, int64_t until_ns,
                        uint32_t most, int64_t *times)
{
    const __int128 apart = (__int128)from_ns - f->nominal_ns;
    __int128 steps = apart / f->every_ns;
    if (steps * f->every_ns < apart)
        steps++;
    __int128 at = (__int128)f->nominal_ns + steps * f->every_ns;
    uint32_t count = 0;
    for (; count < most && at <= until_ns; at += f->every_ns)
        times[count++] = (int64_t)at;
    return count;
}

/* ---- rows ---------------------------------------------------------------------------------- */

static const uint8_t *key_of(const struct pg_arena *a, const struct pg_schedule_fields *f)
{
    return blob_at(&a->blobs, f->blob);
}

static const uint8_t *tag_of(const struct pg_arena *a, const struct pg_schedule_fields *f)
{
    return key_of(a, f) + f->key_len + f->spec_len + f->zone_len;
}

static uint32_t granules_of(const struct pg_schedule_fields *f)
{
    return blob_granules(schedule_bytes(f));
}

uint32_t schedules_of(const struct pg_arena *a, uint32_t uid)
{
    uint32_t count = 0;
    for (uint32_t row = 0; row < a->schedule_rows; row++)
        count += schedule_used(a, row) && schedule_fields(a, row)->uid == uid;
    return count;
}

static uint32_t free_row(const struct pg_arena *a)
{
    for (uint32_t row = 0; row < a->schedule_rows; row++)
        if (!schedule_used(a, row))
            return row;
    return PG_NIL;
}

void schedule_restore(struct pg_arena *a, uint32_t row, uint64_t version,
                      const struct pg_schedule_fields *fields)
{
    struct pg_schedule *s = schedule_at(a, row);
    s->fields[version % 2] = *fields;
    STORE_RELEASE(&s->version, version);
}

/* Return whether an occurrence has fired since the put, or was skipped. */
static bool has_fired(const struct pg_arena *a, uint32_t row)
{
    return schedule_fields(a, row)->armed > (schedule_at(a, row)->slot != PG_NIL);
}

int64_t schedule_fired_ns(const struct pg_arena *a, uint32_t row)
{
    if (row == PG_NIL)
        return 0;
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    const int64_t fired_ns = schedule_at(a, row)->slot != PG_NIL ? f->base_ns : f->nominal_ns;
    return has_fired(a, row) && fired_ns > f->before_ns ? fired_ns : f->before_ns;
}

int64_t schedule_begin_ns(const struct pg_arena *a, uint32_t row)
{
    const int64_t wall_ns = schedule_wall_ns(a), fired_ns = schedule_fired_ns(a, row);
    return fired_ns > wall_ns ? fired_ns : wall_ns;
}

/* ---- arming -------------------------------------------------------------------------------- */

/* Write the key of an occurrence: the key of the schedule, '@' and the nominal time. Return its
 * length. */
static uint8_t occurrence_key(const struct pg_arena *a, const struct pg_schedule_fields *f,
                              int64_t nominal_ns, uint8_t key[PG_KEY_MAX])
{
    uint8_t digits[20];
    uint32_t count = 0, len = f->key_len;
    uint64_t left = nominal_ns < 0 ? 0 - (uint64_t)nominal_ns : (uint64_t)nominal_ns;
    do
        digits[count++] = (uint8_t)('0' + left % 10);
    while ((left /= 10) != 0);
    memcpy(key, key_of(a, f), len);
    key[len++] = '@';
    if (nominal_ns < 0)
        key[len++] = '-';
    while (count != 0)
        key[len++] = digits[--count];
    return (uint8_t)len;
}

/* Put a timer for a uid, as if this uid had sent a message. */
static void put_for(struct pg_arena *a, uint32_t uid, struct put *p, struct pg_result *r)
{
    const uint32_t sender = a->call.uid;
    a->call.uid = uid;
    timers_put(a, p, r);
    a->call.uid = sender;
}

/* Longest items of an occurrence: a tag, PG_EXT_SCHEDULE and a priority. */
#define ITEMS_BYTES (3 * sizeof(struct pg_ext) + PG_TAG_MAX + 1)

/* Write the items of an occurrence. Return their length. */
static uint32_t occurrence_items(const struct pg_arena *a, const struct pg_schedule_fields *f,
                                 uint32_t row, int64_t nominal_ns, uint8_t items[ITEMS_BYTES])
{
    const struct pg_ext tag = {PG_EXT_TAG, f->tag_len, 0};
    const struct pg_ext schedule = {PG_EXT_SCHEDULE, row, nominal_ns};
    const struct pg_ext priority = {PG_EXT_PRIORITY, f->priority, 0};
    uint8_t *to = items;
    memset(items, 0, ITEMS_BYTES);
    if (f->tag_len != 0) {
        memcpy(to, &tag, sizeof tag);
        memcpy(to + sizeof tag, tag_of(a, f), f->tag_len);
        to += sizeof tag + blob_granules(f->tag_len) * PG_GRANULE;
    }
    memcpy(to, &schedule, sizeof schedule);
    to += sizeof schedule;
    if (f->has_priority) {
        memcpy(to, &priority, sizeof priority);
        to += sizeof priority;
    }
    return (uint32_t)(to - items);
}

/* Put the timer of an occurrence. `row` goes into its item; PG_NIL = the occurrence is additional.
 * `once`: do not arm it if its notice is in the replay buffer. Return its slot; PG_NIL = the key
 * has a timer or this notice, or the timer was refused. */
static uint32_t occurrence_put(struct pg_arena *a, const struct pg_schedule_fields *f,
                               struct put *p, int64_t nominal_ns, uint32_t row, bool once,
                               struct pg_result *r)
{
    uint8_t key[PG_KEY_MAX];
    uint8_t items[ITEMS_BYTES];
    const uint32_t ns = topic_at(a, f->topic)->namespace_row;
    const uint8_t len = occurrence_key(a, f, nominal_ns, key);
    struct probe at;
    p->key = (struct key){key, key_hash(a, ns, PG_KEY_STR, key, len), ns, PG_NIL, len, PG_KEY_STR};
    p->payload = tag_of(a, f) + f->tag_len;
    p->payload_len = f->payload_len;
    p->topic = f->topic;
    p->mode = PG_MODE_KEEP;
    p->account = account_of(a, f->uid);
    p->items = items;
    p->items_len = occurrence_items(a, f, row, nominal_ns, items);
    p->occurrence = true;
    const uint32_t id = once ? key_find(a, &p->key, &at) : PG_NIL;
    if (id != PG_NIL && id >= a->slots.capacity)
        answer(r, replay_of_id(a, id)->ticket >> 8, PG_ST_KEPT, 0);
    else
        put_for(a, f->uid, p, r);
    if ((r->ticket & 0xff) != PG_ST_ADDED)
        return PG_NIL;
    a->metrics->occurrences++;
    return timers_find(a, &p->key);
}

/* Return the end of the previous occurrence or of its last job, or for a schedule without a delay
 * the time of the newest occurrence, on the arena's clock. A kill may have interrupted the deletion
 * of the group whose jobs were open. The delay then counts from the rebuild. */
static int64_t counts_from_ns(const struct pg_arena *a, uint32_t row)
{
    const int64_t due_ns = schedule_fields(a, row)->due_ns;
    return nominal_is_known(due_ns) ? due_ns : a->state.started_ns;
}

/* Let a row move on to the occurrence with nominal time after_ns. */
static void row_advance(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    f.base_ns = f.nominal_ns;
    f.nominal_ns = f.after_ns;
    f.armed++;
    f.due_ns = time_plus(counts_from_ns(a, row), f.every_ns);
    f.after_ns = limited(&f, f.every_ns == 0 ? f.then_ns : time_plus(f.nominal_ns, f.every_ns));
    if (f.overlap == PG_OVERLAP_DELAY)
        f.after_ns = after_delay(&f);
    const bool follows = f.base_ns < f.nominal_ns && spans_have(&f, f.base_ns);
    spans_add(&f, follows ? f.base_ns : f.nominal_ns, f.nominal_ns);
    f.then_ns = f.after_ns == PG_NOMINAL_NONE ? PG_NOMINAL_NONE : PG_NOMINAL_UNKNOWN;
    schedule_store(a, row, &f, false);
}

/* Return whether the row lacks an armed occurrence that nothing holds back. */
static bool lacks_occurrence(const struct pg_arena *a, uint32_t row)
{
    return schedule_fields(a, row)->state == PG_SCHEDULE_ACTIVE &&
           schedule_at(a, row)->slot == PG_NIL && !schedule_holds(a, row);
}

/* Store the time after the delay of a row, if the delay has begun. */
static void delay_count(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule_fields *f = schedule_fields(a, row);
    if (f->overlap != PG_OVERLAP_DELAY || f->after_ns == PG_NOMINAL_NONE ||
        !lacks_occurrence(a, row))
        return;
    const int64_t wall_ns = time_plus(counts_from_ns(a, row), a->header->wall_offset_ns);
    STORE_RELEASE(&f->after_ns, limited(f, time_plus(wall_ns, f->every_ns)));
}

/* Return whether the times that the next occurrence needs are known. */
static bool next_is_known(const struct pg_schedule_fields *f)
{
    return nominal_is_known(f->after_ns) && limited(f, f->after_ns) != PG_NOMINAL_NONE &&
           (f->every_ns != 0 || f->jitter_ns == 0 || nominal_is_known(f->then_ns));
}

/* Return the deadline of the next occurrence: boot time, with a cron expression wall clock. */
static int64_t next_ns(const struct pg_arena *a, uint32_t row)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    return time_plus(f->every_ns != 0 ? time_plus(counts_from_ns(a, row), f->every_ns)
                                           : f->after_ns,
                     jitter_of(a, row));
}

/* Return the deadline of the next occurrence on the boot clock; INT64_MAX = none, or unknown. */
static int64_t next_boot_ns(const struct pg_arena *a, uint32_t row)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    if (!next_is_known(f))
        return INT64_MAX;
    return f->every_ns != 0 ? next_ns(a, row)
                            : time_plus(next_ns(a, row), -a->header->wall_offset_ns);
}

int64_t schedule_follower_ns(const struct pg_arena *a, uint32_t slot)
{
    const uint32_t row = schedule_of_slot(a, slot);
    return row != PG_NIL ? next_boot_ns(a, row) : INT64_MAX;
}

/* Note that a slot has the armed occurrence of a row. */
static void slot_set(struct pg_arena *a, uint32_t row, uint32_t slot)
{
    schedule_at(a, row)->slot = slot;
    a->metrics->schedules_armed++;
}

enum arming {
    ARMING_DONE,
    ARMING_ALONE_REFUSED,         /* its topic or its time is refused; others may be armed */
    ARMING_REFUSED                /* the arena or the WAL buffer has no space */
};

/* Arm the next occurrence of a row. If the key is that of another timer, this timer stands for the
 * occurrence. An occurrence whose key stays unique is skipped. *more: an occurrence is due, or a
 * consumer group is making space. */
static enum arming row_arm(struct pg_arena *a, uint32_t row, bool *more)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    struct pg_result r;
    struct put p = {.time_kind = f->every_ns != 0 ? PG_T_BOOT : PG_T_WALL,
                    .time_ns = next_ns(a, row)};
    const uint32_t slot = occurrence_put(a, f, &p, f->after_ns, row, false, &r);
    const unsigned status = r.ticket & 0xff;
    if (slot == PG_NIL && status != PG_ST_KEPT && status != PG_ST_EXISTS) {
        *more |= status == PG_ST_BUSY && wal_buffer_refusal(a) == PG_ST_NONE;
        return status == PG_ST_FULL_GROUP || status == PG_ST_TOO_FAR ? ARMING_ALONE_REFUSED
                                                                    : ARMING_REFUSED;
    }
    *more |= r.deadline_ns <= a->state.now_ns;
    if (slot != PG_NIL)
        slot_set(a, row, slot);
    a->metrics->skipped += status == PG_ST_EXISTS;
    row_advance(a, row);
    schedule_queue(a, row);
    return ARMING_DONE;
}

/* Return whether timers may be armed at this time. */
static bool arms(const struct pg_arena *a)
{
    return !a->state.draining && !wal_buffer_full(a) && wal_buffer_refusal(a) != PG_ST_WAL;
}

static int64_t counted_boot_ns(struct pg_arena *a, uint32_t row)
{
    delay_count(a, row);
    return next_boot_ns(a, row);
}

/* Take the schedule with the earliest next occurrence among the first LOOKED_AT in the list, so
 * that schedules which wait for space get it in this order, also after a recovery. */
static uint32_t earliest_take(struct pg_arena *a)
{
    uint32_t row = a->state.schedules_due, before = PG_NIL, first = row, before_first = PG_NIL;
    int64_t first_ns = counted_boot_ns(a, row);
    for (uint32_t n = 1; n < LOOKED_AT; n++) {
        before = row;
        row = schedule_at(a, row)->next_due;
        if (row == PG_NIL)
            break;
        const int64_t then_ns = counted_boot_ns(a, row);
        if (then_ns > first_ns || (then_ns == first_ns && row > first))
            continue;
        first = row;
        before_first = before;
        first_ns = then_ns;
    }
    schedule_due_take(a, before_first, first);
    return first;
}

/* Put a row aside until the end of the step. With `is_due`, schedule_due() skips it. */
static void refused_push(struct pg_arena *a, uint32_t *refused, uint32_t row)
{
    struct pg_schedule *s = schedule_at(a, row);
    s->is_due = 1;
    s->next_due = *refused;
    *refused = row;
}

/* Put the refused rows back, behind the others. Return their number. */
static uint32_t refused_due(struct pg_arena *a, uint32_t refused)
{
    uint32_t count = 0;
    for (; refused != PG_NIL; count++) {
        const uint32_t row = refused;
        refused = schedule_at(a, row)->next_due;
        schedule_at(a, row)->is_due = 0;
        schedule_due(a, row);
    }
    return count;
}

/* A refused row is tried again in the next iteration. If the arena has no space, it goes first.
 * If only a consumer group of its topic has no space, other rows do not wait for it. */
bool schedules_step(struct pg_arena *a, uint32_t budget)
{
    bool more = false, has_space = true;
    const bool waited = schedules_waiting(a);
    uint32_t left = budget, refused = PG_NIL;
    for (; a->state.schedules_due != PG_NIL && left != 0 && has_space && arms(a); left--) {
        const uint32_t row = earliest_take(a);
        if (!lacks_occurrence(a, row) || !next_is_known(schedule_fields(a, row)))
            continue;
        const enum arming arming = row_arm(a, row, &more);
        has_space = arming != ARMING_REFUSED;
        if (!has_space)
            schedule_due(a, row);
        else if (arming == ARMING_ALONE_REFUSED)
            refused_push(a, &refused, row);
    }
    const bool useful = refused_due(a, refused) < budget;
    const bool goes_on = more || (left == 0 && has_space && useful);
    a->state.schedules_stuck = a->state.schedules_due != PG_NIL && !goes_on;
    if (waited)
        late_changed(a);           /* a late timer may have waited for these occurrences */
    return goes_on;
}

/* ---- changes ------------------------------------------------------------------------------- */

/* Free the slot of the armed occurrence, if there is one. The row has other fields already. */
static void slot_drop(struct pg_arena *a, uint32_t row)
{
    const uint32_t slot = schedule_at(a, row)->slot;
    if (slot == PG_NIL)
        return;
    schedule_at(a, row)->slot = PG_NIL;
    a->metrics->schedules_armed--;
    timer_drop(a, slot);
}

static void blob_drop(struct pg_arena *a, const struct pg_schedule_fields *f)
{
    blobs_give(&a->blobs, f->blob, granules_of(f));
    a->metrics->blob_bytes -= (uint64_t)granules_of(f) * PG_GRANULE;
}

static void fields_begin(const struct pg_arena *a, struct pg_schedule_fields *f)
{
    if (f->every_ns != 0) {
        f->base_ns = schedule_wall_ns(a);
        f->due_ns = a->call.moment_ns;
        f->after_ns = limited(f, time_plus(f->base_ns, f->every_ns));
        f->then_ns = PG_NOMINAL_UNKNOWN;
    }
    f->nominal_ns = f->put_ns = f->base_ns;
}

bool schedule_same(const struct pg_arena *a, uint32_t row, const struct pg_schedule_fields *w,
                   const uint8_t *bytes)
{
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    return f->topic == w->topic && f->every_ns == w->every_ns && f->until_ns == w->until_ns &&
           f->jitter_ns == w->jitter_ns && f->count == w->count && f->overlap == w->overlap &&
           f->key_len == w->key_len && f->spec_len == w->spec_len && f->zone_len == w->zone_len &&
           f->tag_len == w->tag_len && f->has_priority == w->has_priority &&
           f->priority == w->priority && f->payload_len == w->payload_len &&
           memcmp(key_of(a, f), bytes, schedule_bytes(w)) == 0;
}

/* Copy the spans of a schedule to its changed fields, without its armed occurrence. */
static void spans_copy(const struct pg_arena *a, uint32_t row, struct pg_schedule_fields *f)
{
    const struct pg_schedule_fields *old = schedule_fields(a, row);
    f->spans = old->spans;
    memcpy(f->fired, old->fired, sizeof f->fired);
    if (schedule_at(a, row)->slot != PG_NIL)
        spans_remove(f, old->nominal_ns, old->base_ns);
}

/* Store a new or changed schedule in its row, and free what it replaces. */
static void row_put(struct pg_arena *a, uint32_t row, struct pg_schedule_fields *f)
{
    const struct pg_schedule_fields old = *schedule_fields(a, row);
    const bool replaces = old.state != PG_SCHEDULE_NONE;
    f->state = replaces ? old.state : PG_SCHEDULE_ACTIVE;
    f->revision = replaces ? old.revision + 1 : 1;
    f->put_version = schedule_at(a, row)->version + 1;
    f->since_ticket = a->header->next_ticket;
    f->first_ticket = replaces ? old.first_ticket : f->since_ticket;
    f->before_ns = replaces ? schedule_fired_ns(a, row) : 0;
    if (replaces)
        spans_copy(a, row, f);
    schedule_store(a, row, f, true);
    if (!replaces) {
        schedule_at(a, row)->open = 0;
        schedule_hashed(a, row);
        a->metrics->schedules++;
        return;
    }
    slot_drop(a, row);
    blob_drop(a, &old);
    names_look_again(a);
}

unsigned schedule_put(struct pg_arena *a, const struct pg_schedule_fields *wanted,
                      const uint8_t *bytes, uint32_t *row)
{
    struct pg_schedule_fields f = *wanted;
    const unsigned status = *row == PG_NIL ? PG_ST_ADDED : PG_ST_REPLACED;
    fields_begin(a, &f);
    if (f.after_ns == PG_NOMINAL_NONE)
        return PG_ST_NO_OCCURRENCE;
    if (*row == PG_NIL && (*row = free_row(a)) == PG_NIL)
        return PG_ST_FULL_SCHEDULES;
    f.blob = blobs_take(&a->blobs, granules_of(&f));
    if (f.blob == PG_NIL)
        return payload_refusal(a);
    a->metrics->blob_bytes += (uint64_t)granules_of(&f) * PG_GRANULE;
    memcpy(blob_at(&a->blobs, f.blob), bytes, schedule_bytes(&f));
    row_put(a, *row, &f);
    schedule_queue(a, *row);
    return status;
}

void schedule_delete(struct pg_arena *a, uint32_t row)
{
    const struct pg_schedule_fields old = *schedule_fields(a, row);
    const struct pg_schedule_fields none = {.since_ticket = a->header->next_ticket};
    schedule_unhashed(a, row);
    schedule_store(a, row, &none, false);
    slot_drop(a, row);
    blob_drop(a, &old);
    a->metrics->schedules--;
    names_look_again(a);
}

void schedule_pause(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    if (f.state == PG_SCHEDULE_PAUSED)
        return;
    fields_unarm(a, row, &f);
    f.state = PG_SCHEDULE_PAUSED;
    f.after_ns = f.then_ns = PG_NOMINAL_UNKNOWN;
    schedule_store(a, row, &f, false);
    slot_drop(a, row);
}

/* Move an `every` schedule to its newest nominal time that is not after the current time. */
static void steps_skip(const struct pg_arena *a, struct pg_schedule_fields *f)
{
    const int64_t late_ns = a->call.moment_ns - f->due_ns;
    const int64_t skipped_ns = late_ns <= 0 ? 0 : late_ns / f->every_ns * f->every_ns;
    f->due_ns = time_plus(f->due_ns, skipped_ns);
    f->nominal_ns = time_plus(f->nominal_ns, skipped_ns);
    f->after_ns = limited(f, time_plus(f->nominal_ns, f->every_ns));
}

void schedule_resume(struct pg_arena *a, uint32_t row, int64_t base_ns, int64_t after_ns,
                     int64_t then_ns)
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    f.state = PG_SCHEDULE_ACTIVE;
    if (f.overlap == PG_OVERLAP_DELAY) {
        f.due_ns = a->call.moment_ns;
        f.after_ns = after_delay(&f);
    } else if (f.every_ns != 0) {
        steps_skip(a, &f);
    } else {
        f.nominal_ns = base_ns;
        f.after_ns = limited(&f, after_ns);
        f.then_ns = then_ns;
    }
    f.base_ns = f.nominal_ns;
    schedule_store(a, row, &f, false);
    schedule_queue(a, row);
}

void schedule_extra(struct pg_arena *a, uint32_t row, int64_t nominal_ns, bool is_limited,
                    bool repeat, struct pg_result *r)
{
    struct put p = {.time_kind = PG_T_BOOT, .time_ns = a->state.now_ns, .limited = is_limited};
    occurrence_put(a, schedule_fields(a, row), &p, nominal_ns, PG_NIL, !repeat, r);
}

bool schedule_has_nominal(const struct pg_schedule_fields *f, int64_t time_ns)
{
    if (f->overlap == PG_OVERLAP_DELAY)
        return false;
    return f->every_ns != 0 ? ((__int128)time_ns - f->nominal_ns) % f->every_ns == 0
                            : time_ns % SECOND_NS == 0;
}

void schedule_fired(struct pg_arena *a, uint32_t row, int64_t first_ns, int64_t last_ns)
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    spans_add(&f, first_ns, last_ns);
    schedule_store(a, row, &f, false);
}

/* ---- questions to the daemon ---------------------------------------------------------------- */

/* The daemon computes an armed occurrence again from the time before it. */
static bool rechecks(const struct pg_schedule *s) { return s->rechecks && s->slot != PG_NIL; }

static struct pg_question question_of(const struct pg_arena *a, uint32_t row)
{
    const struct pg_schedule *s = schedule_at(a, row);
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    const uint8_t *spec = key_of(a, f) + f->key_len;
    return (struct pg_question){.spec = spec, .zone = spec + f->spec_len, .spec_len = f->spec_len,
                                .zone_len = f->zone_len, .count = rechecks(s) ? 3 : 2,
                                .row = row, .version = s->version,
                                .after_ns = rechecks(s) ? f->base_ns : f->nominal_ns,
                                .until_ns = f->until_ns};
}

/* The wall clock was set back to before the put, and no occurrence has fired: the schedule counts
 * from the current time on. */
static void row_restart(struct pg_arena *a, uint32_t row)
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    fields_unarm(a, row, &f);
    f.base_ns = f.nominal_ns = f.put_ns = schedule_begin_ns(a, row);
    f.after_ns = f.then_ns = PG_NOMINAL_UNKNOWN;
    schedule_store(a, row, &f, false);
    slot_drop(a, row);
}

/* Return whether a row that is computed again has to begin again first. A schedule whose occurrences
 * have fired continues after the newest one, so that no key of an occurrence comes twice. */
static bool restarts(const struct pg_arena *a, uint32_t row)
{
    return schedule_at(a, row)->rechecks && !has_fired(a, row) &&
           schedule_begin_ns(a, row) < schedule_fields(a, row)->put_ns;
}

int pg_schedule_question(struct pg_arena *a, struct pg_question *q)
{
    const struct calendar *c = &a->state.calendar;
    if (c->state == CALENDAR_ASKED) {
        *q = c->question;
        return 1;
    }
    while (a->state.schedules_asked != PG_NIL) {
        const uint32_t row = a->state.schedules_asked;
        if (restarts(a, row)) {
            if (wal_buffer_full(a))
                return 0;
            row_restart(a, row);
        }
        const struct pg_schedule_fields *f = schedule_fields(a, row);
        *q = question_of(a, row);
        if (f->state == PG_SCHEDULE_ACTIVE && (schedule_lacks_times(f) || rechecks(schedule_at(a, row))))
            return 1;
        schedule_ask_take(a);
        late_changed(a);           /* a late timer may have waited for the answer */
    }
    return 0;
}

/* Store the times of the next occurrences. Each is stored alone: they follow from nominal_ns, and a
 * missing one is asked for again. */
static void times_store(struct pg_schedule_fields *f, int64_t after_ns, int64_t then_ns)
{
    STORE_RELEASE(&f->after_ns, limited(f, after_ns));
    STORE_RELEASE(&f->then_ns, then_ns);
}

/* The armed occurrence has another time than the daemon now computes. Arm it again. */
static void row_correct(struct pg_arena *a, uint32_t row, const int64_t times[3])
{
    struct pg_schedule_fields f = *schedule_fields(a, row);
    fields_unarm(a, row, &f);
    f.after_ns = limited(&f, times[0]);
    f.then_ns = times[1];
    schedule_store(a, row, &f, false);
    slot_drop(a, row);
    schedule_queue(a, row);
}

static void row_answer(struct pg_arena *a, uint32_t row, const int64_t times[3])
{
    struct pg_schedule_fields *f = schedule_fields(a, row);
    struct pg_schedule *s = schedule_at(a, row);
    if (!rechecks(s))
        times_store(f, times[0], times[1]);
    else if (times[0] == f->nominal_ns || times[0] == PG_NOMINAL_NONE)
        times_store(f, times[1], times[2]);
    else
        row_correct(a, row, times);
    s->rechecks = 0;
    schedule_queue(a, row);
}

void pg_schedule_answer(struct pg_arena *a, const struct pg_question *q, uint32_t status,
                        const int64_t *times, uint32_t count)
{
    struct calendar *c = &a->state.calendar;
    int64_t known[3] = {PG_NOMINAL_NONE, PG_NOMINAL_NONE, PG_NOMINAL_NONE};
    if (q->row == PG_NIL) {
        c->state = CALENDAR_ANSWERED;
        c->status = status;
        c->count = count < q->count ? count : q->count;
        memcpy(c->times, times, c->count * sizeof *times);
        return;
    }
    if (a->state.schedules_asked != q->row || schedule_at(a, q->row)->version != q->version ||
        wal_buffer_full(a))
        return;
    schedule_ask_take(a);
    memcpy(known, times, (count < 3 ? count : 3) * sizeof *times);
    if (status == PG_ST_DONE)
        row_answer(a, q->row, known);
    late_changed(a);
    wal_buffer_settle(a);
}

void pg_schedules_recheck(struct pg_arena *a)
{
    for (uint32_t row = 0; row < a->schedule_rows; row++) {
        struct pg_schedule_fields *f = schedule_fields(a, row);
        if (f->state != PG_SCHEDULE_ACTIVE || f->every_ns != 0)
            continue;
        if (schedule_at(a, row)->slot == PG_NIL)
            f->after_ns = PG_NOMINAL_UNKNOWN;
        schedule_at(a, row)->rechecks = 1;
        schedule_queue(a, row);
        schedule_ask(a, row);
    }
}

/* ---- rebuild ------------------------------------------------------------------------------- */

void schedules_init(struct pg_arena *a)
{
    a->state.schedules_due = a->state.schedules_asked = a->state.stale_occurrence = PG_NIL;
    a->state.calendar.state = CALENDAR_IDLE;
    a->metrics->schedules = a->metrics->schedules_armed = 0;
    for (uint32_t row = 0; row < a->schedule_rows; row++) {
        struct pg_schedule *s = schedule_at(a, row);
        s->slot = s->first_hashed = PG_NIL;
        s->is_due = s->is_asked = s->rechecks = 0;
        s->open = 0;
        s->found = (struct pg_fired_span){INT64_MAX, INT64_MIN};
    }
}

bool schedule_sound(const struct pg_arena *a, const struct pg_schedule_fields *f)
{
    return f->state <= PG_SCHEDULE_PAUSED && f->overlap < PG_OVERLAPS && f->topic < a->topic_rows &&
           topic_at(a, f->topic)->name_len != 0 && f->key_len != 0 &&
           f->key_len <= PG_SCHEDULE_KEY_MAX && f->zone_len <= PG_ZONE_MAX &&
           f->tag_len <= PG_TAG_MAX && f->priority <= PG_PRIORITY_MAX &&
           f->payload_len <= PG_PAYLOAD_MAX && f->every_ns >= 0 && f->jitter_ns >= 0 &&
           spans_sound(f) &&
           (f->every_ns != 0 || (f->spec_len != 0 && f->overlap != PG_OVERLAP_DELAY)) &&
           (uint64_t)f->blob + granules_of(f) <= a->blobs.granules;
}

bool schedules_rebuild(struct pg_arena *a, struct pg_fault *why)
{
    schedules_init(a);
    for (uint32_t row = 0; row < a->schedule_rows; row++) {
        const struct pg_schedule_fields *f = schedule_fields(a, row);
        if (!schedule_used(a, row))
            continue;
        if (!schedule_sound(a, f))
            return fault_set(why, "schedules", "fields of a schedule", row, PG_SCHEDULE_PAUSED,
                             f->state);
        if (!blobs_rebuild_mark(&a->blobs, f->blob, granules_of(f)))
            return fault_set(why, "schedules", "a schedule's blob overlaps another", row, 0,
                             f->blob);
        schedule_hashed(a, row);
        a->metrics->schedules++;
    }
    return true;
}

static bool is_current(const struct pg_arena *a, uint32_t row, uint32_t slot)
{
    return row < a->schedule_rows && schedule_fields(a, row)->state == PG_SCHEDULE_ACTIVE &&
           !ticket_older(ctl_ticket(slot_hot(a, slot)->ctl),
                         schedule_fields(a, row)->since_ticket);
}

/* Return the schedule of an armed additional occurrence if its spans lack the nominal time, because
 * a kill interrupted the message that armed the occurrence; else PG_NIL. Return PG_NIL also if the
 * newest put is later than the occurrence: that put may have changed the nominal times. */
static uint32_t lacking_row(const struct pg_arena *a, uint32_t slot, int64_t nominal_ns)
{
    const struct pg_cold *c = slot_cold(a, slot);
    const uint8_t *key = blob_at(&a->blobs, c->blob) + c->ext_len;
    const struct name prefix = {(const char *)key, occurrence_prefix(key, c->key_len)};
    const uint32_t row = schedule_find(a, slot_namespace(a, slot), prefix);
    if (row == PG_NIL)
        return PG_NIL;
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    const bool lacks = !ticket_older(ctl_ticket(slot_hot(a, slot)->ctl), f->since_ticket) &&
                       schedule_has_nominal(f, nominal_ns) && !spans_have(f, nominal_ns);
    return lacks ? row : PG_NIL;
}

static void extra_note(struct pg_arena *a, uint32_t slot, int64_t nominal_ns)
{
    const uint32_t row = lacking_row(a, slot, nominal_ns);
    if (row == PG_NIL)
        return;
    struct pg_fired_span *found = &schedule_at(a, row)->found;
    found->first_ns = nominal_ns < found->first_ns ? nominal_ns : found->first_ns;
    found->last_ns = nominal_ns > found->last_ns ? nominal_ns : found->last_ns;
}

void schedule_note(struct pg_arena *a, uint32_t slot)
{
    const struct pg_ext *item = occurrence_item(a, slot);
    if (item == NULL)
        return;
    if (item->extra == PG_NIL)
        extra_note(a, slot, item->value);
    else if (is_current(a, item->extra, slot) && schedule_at(a, item->extra)->slot == PG_NIL)
        slot_set(a, item->extra, slot);
    else
        a->state.stale_occurrence = slot;
}

/* A kill may have come after an occurrence was armed and before its row moved on to it. */
static void row_settle(struct pg_arena *a, uint32_t row)
{
    const uint32_t slot = schedule_at(a, row)->slot;
    const struct pg_ext *item = slot == PG_NIL ? NULL : occurrence_item(a, slot);
    struct pg_schedule_fields *f = schedule_fields(a, row);
    if (item != NULL && item->value != f->nominal_ns) {
        f->after_ns = item->value;
        row_advance(a, row);
    }
    const struct pg_fired_span found = schedule_at(a, row)->found;
    if (found.first_ns <= found.last_ns)
        schedule_fired(a, row, found.first_ns, found.last_ns);
    schedule_queue(a, row);
}

void schedules_settle(struct pg_arena *a)
{
    const uint32_t stale = a->state.stale_occurrence;
    for (uint32_t row = 0; row < a->schedule_rows; row++)
        if (schedule_used(a, row))
            row_settle(a, row);
    if (stale != PG_NIL && ctl_live(slot_hot(a, stale)->ctl) && schedule_stale(a, stale))
        timer_drop(a, stale);
    a->state.stale_occurrence = PG_NIL;
}

/* ---- check --------------------------------------------------------------------------------- */

static uint32_t schedule_of_key(const struct pg_arena *a, const struct pg_schedule_fields *f)
{
    return schedule_find(a, topic_at(a, f->topic)->namespace_row,
                         (struct name){(const char *)key_of(a, f), f->key_len});
}

static bool row_check(const struct pg_arena *a, uint32_t row, struct pg_fault *fault)
{
    const struct pg_schedule *s = schedule_at(a, row);
    const struct pg_schedule_fields *f = schedule_fields(a, row);
    if (!schedule_sound(a, f))
        return fault_set(fault, "schedules", "fields of a schedule", row, PG_SCHEDULE_PAUSED,
                         f->state);
    if (a->secret == NULL)
        return true;
    if (s->hash != schedule_hash(a, f))
        return fault_set(fault, "schedules", "hash of a schedule's key", row, schedule_hash(a, f),
                         s->hash);
    if (schedule_of_key(a, f) != row)
        return fault_set(fault, "schedules", "a key that does not lead to its schedule", row, row,
                         schedule_of_key(a, f));
    if (s->slot == PG_NIL)
        return true;
    if (s->slot >= a->slots.capacity || !ctl_live(slot_hot(a, s->slot)->ctl) ||
        schedule_of_slot(a, s->slot) != row || !spans_have(f, f->nominal_ns) ||
        occurrence_item(a, s->slot)->value != f->nominal_ns)
        return fault_set(fault, "schedules", "the armed occurrence of a schedule", row, row,
                         s->slot);
    return true;
}

/* Compare the counts of open jobs with the jobs. Sums stand for the counts, so that the check needs
 * no memory: each job adds a number that belongs to its schedule. */
static bool open_check(const struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t counted = 0, found = 0;
    for (uint32_t row = 0; row < a->schedule_rows; row++)
        if (schedule_used(a, row))
            counted += schedule_at(a, row)->open * id_mix(row + 1ull);
    for (uint32_t row = 0; row < a->job_slots.capacity && a->group_rows != 0; row++) {
        const struct pg_job *j = job_at(a, row);
        const bool open = job_state(j) != PG_JOB_FREE && job_state(j) != PG_JOB_DEAD;
        const uint32_t schedule = open ? schedule_of_job(a, j) : PG_NIL;
        found += schedule == PG_NIL ? 0 : id_mix(schedule + 1ull);
    }
    return found == counted || fault_set(fault, "schedules", "counts of open jobs", 0, found, counted);
}

/* Look for an armed additional occurrence that a backfill would fire again. */
static bool extras_check(const struct pg_arena *a, struct pg_fault *fault)
{
    for (uint32_t slot = 0; slot < a->slots.capacity; slot++) {
        const struct pg_ext *item =
            ctl_live(slot_hot(a, slot)->ctl) ? occurrence_item(a, slot) : NULL;
        if (item != NULL && item->extra == PG_NIL && lacking_row(a, slot, item->value) != PG_NIL)
            return fault_set(fault, "schedules", "an occurrence that does not count as fired", slot,
                             0, 1);
    }
    return true;
}

static bool counts_check(const struct pg_arena *a, uint64_t used, uint64_t armed,
                         struct pg_fault *fault)
{
    if (used != a->metrics->schedules)
        return fault_set(fault, "schedules", "count of schedules", 0, used,
                         a->metrics->schedules);
    if (a->secret == NULL)
        return true;
    if (armed != a->metrics->schedules_armed)
        return fault_set(fault, "schedules", "count of armed schedules", 0, armed,
                         a->metrics->schedules_armed);
    return open_check(a, fault) && (used == 0 || extras_check(a, fault));
}

bool schedules_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules)
{
    uint64_t used = 0, armed = 0;
    for (uint32_t row = 0; row < a->schedule_rows; row++) {
        if (!schedule_used(a, row))
            continue;
        if (!row_check(a, row, fault))
            return false;
        *granules += granules_of(schedule_fields(a, row));
        armed += schedule_at(a, row)->slot != PG_NIL;
        used++;
    }
    return counts_check(a, used, armed, fault);
}
