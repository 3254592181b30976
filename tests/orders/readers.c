/* readers.c - scenarios with a daemon that changes the arena, and a process that reads it at the
 * same time. */
#include "scenarios.h"

#include "check.h"
#include "core/core.h"
#include "core/state/compaction.h"
#include "core/state/items.h"
#include "core/state/names.h"
#include "core/state/timers.h"

enum { LAYOUT = 4711, OUT = 1 << 16, KEY = 8, PAYLOAD = 8, RING = 16, FAR_NS = 1000000,
       DUE_NS = 3000, LIMIT_NS = 1000000000 };

static struct pg_arena *daemon_side, *reader_side, *daemon_before;
static uint8_t *arena, *secret, *out;
static uint64_t lsn;              /* LSN of the first frame that the daemon's thread appends */

static void arena_make(bool with_wal)
{
    const struct pg_config config = {
        .layout_id = LAYOUT, .payload_bytes = 4096, .replay_bytes_max = 2048, .tick_ns = 1000,
        .now_ns = 1000, .stream_id = 1, .secret = {1, 2}, .capacity = 2, .replay_capacity = RING,
        .fanout = 2, .namespaces = 2, .topics = 2, .sessions = 2, .watches = 4, .watermarks = 4,
        .accounts = 2, .inbox_max = 8, .clock_kind = PG_CLOCK_VIRTUAL,
        .wal_buffer_bytes = with_wal ? PG_WAL_BUFFER_MIN : 0};
    struct pg_fault why;
    arena = zeroed(pg_arena_bytes(&config));
    secret = zeroed(pg_private_bytes(&config));
    daemon_side = malloc(pg_handle_bytes());
    daemon_before = malloc(pg_handle_bytes());
    reader_side = malloc(pg_handle_bytes());
    out = zeroed(OUT);
    CHECK(daemon_side != NULL && daemon_before != NULL && reader_side != NULL);
    CHECK(pg_create(daemon_side, arena, secret, &config));
    CHECK(pg_attach(reader_side, arena, pg_arena_bytes(&config), NULL, 0, LAYOUT, &why));
    model_watch(arena, pg_arena_bytes(&config));
    model_watch(secret, pg_private_bytes(&config));
}

/* Called at the end of each setup: saves the state from which the threads start. */
static void made(void)
{
    memcpy(daemon_before, daemon_side, pg_handle_bytes());
    lsn = daemon_side->wal_buffer != NULL ? daemon_side->wal_buffer->next_lsn : 0;
}
static void again(void) { memcpy(daemon_side, daemon_before, pg_handle_bytes()); }

/* Key and payload of the n-th timer that a scenario arms. The keys and payloads of different timers
 * differ in one byte only, because each further word that differs doubles the number of
 * executions. */
static void number_bytes(uint8_t bytes[8], uint32_t n, uint8_t mark)
{
    memset(bytes, mark, 8);
    bytes[0] = (uint8_t)n;
}

static struct pg_put put_of(uint32_t n, int64_t time_ns, uint8_t key[KEY], uint8_t payload[PAYLOAD])
{
    number_bytes(key, n, 'k');
    number_bytes(payload, n, 'p');
    return (struct pg_put){.namespace_name = "n", .namespace_len = 1, .topic_name = "t",
                           .topic_len = 1, .key = key, .key_len = KEY, .key_type = PG_KEY_BYTES,
                           .payload = payload, .payload_len = PAYLOAD, .time_ns = time_ns};
}

/* Arms timer `n` with the key of timer `as`. */
static void arm_as(uint32_t n, uint32_t as, int64_t deadline_ns)
{
    uint8_t key[KEY], payload[PAYLOAD];
    struct pg_put put = put_of(n, deadline_ns, key, payload);
    struct pg_result r;
    number_bytes(key, as, 'k');
    pg_put(daemon_side, &put, &r);
    CHECK(r.ticket >> 8 == n);
}

static void arm(uint32_t n, int64_t deadline_ns) { arm_as(n, n, deadline_ns); }

static void advance(int64_t now_ns)
{
    int more;
    pg_advance(daemon_side, now_ns, 0, now_ns, 100, &more);
}

static bool is_number(const uint8_t *bytes, uint32_t n, uint8_t mark)
{
    uint8_t expected[8];
    number_bytes(expected, n, mark);
    return memcmp(bytes, expected, 8) == 0;
}

/* ---- a slot's control word ------------------------------------------------------------------- */

static uint64_t scanned;

static void slot_setup(void)
{
    arena_make(false);
    arm(1, FAR_NS + 1);
    made();
}

/* The second timer takes the slot and the blob of the first. */
static void slot_daemon(void)
{
    uint8_t key[KEY], payload[PAYLOAD];
    const struct pg_put first = put_of(1, 0, key, payload);
    struct pg_result r;
    pg_cancel(daemon_side, &first, 0, &r);
    arm(2, FAR_NS + 2);
}

static void slot_reader(void)
{
    uint32_t cursor = 0;
    scanned = pg_scan(reader_side, &cursor, 8, out, OUT);
}

static void slot_end(void)
{
    struct pg_info info;
    for (uint64_t at = 0; at < scanned;) {
        memcpy(&info, out + at, sizeof info);
        const uint32_t n = (uint32_t)(info.ticket >> 8);
        const uint8_t *key = out + at + sizeof info + 2;
        if (info.namespace_len != 1 || info.topic_len != 1 || info.key_len != KEY ||
            info.payload_len != PAYLOAD || info.deadline_ns != FAR_NS + n ||
            !is_number(key, n, 'k') || !is_number(key + KEY, n, 'p'))
            model_fault("a scan trusts a copy of two timers");
        at += sizeof info + 2 + KEY + PAYLOAD;
    }
}

const struct scenario slot_scenario = {
    "slot", slot_setup, again, {slot_daemon, slot_reader}, true, true, slot_end};

/* ---- a moved blob ------------------------------------------------------------------------------ */

/* Move the blobs from granule `at` on, so that the next blob gets the place of the first of them. */
static void blobs_move(uint32_t at)
{
    const uint64_t before = daemon_side->metrics->compacted_bytes;
    compaction_begin(daemon_side, at, 32);
    while (compaction_step(daemon_side))
        continue;
    CHECK(daemon_side->metrics->compacted_bytes > before);
}

/* The blob of the first timer moves, and the second timer gets the blob's old place. */
static void moved_daemon(void)
{
    blobs_move(0);
    arm(2, FAR_NS + 2);
}

const struct scenario moved_scenario = {
    "moved", slot_setup, again, {moved_daemon, slot_reader}, true, true, slot_end};

/* ---- a check of a live arena ----------------------------------------------------------------- */

static int sound;

static void check_reader(void)
{
    struct pg_fault why;
    sound = pg_check_live(reader_side, &why);
}

static void check_end(void)
{
    if (!sound)
        model_fault("a check reports damage in a sound arena");
}

const struct scenario check_scenario = {
    "check", slot_setup, again, {slot_daemon, check_reader}, true, true, check_end};

/* ---- a parked timer gets its payload back ---------------------------------------------------- */

static void put_inside(struct put *p, const struct pg_put *put)
{
    *p = (struct put){.key = {.bytes = put->key, .len = put->key_len, .type = put->key_type,
                              .namespace_row = 0},
                      .payload = put->payload, .payload_len = put->payload_len};
    p->key.hash = key_hash(daemon_side, 0, put->key_type, put->key, put->key_len);
}

static void parked_setup(void)
{
    arena_make(true);
    arm(1, 2000);                 /* creates the namespace and the topic */
    advance(3000);
    daemon_side->namespaces[0].park_beyond_ns = 1000;
    arm(2, FAR_NS + 2);
    made();
}

static void parked_daemon(void)
{
    uint8_t key[KEY], payload[PAYLOAD];
    const struct pg_put put = put_of(2, 0, key, payload);
    struct put p;
    struct pg_result r;
    put_inside(&p, &put);
    timers_unpark(daemon_side, &p, 2, &r);
    wal_buffer_settle(daemon_side);
}

static void parked_end(void)
{
    struct pg_info info;
    memcpy(&info, out, sizeof info);
    const uint8_t *key = out + sizeof info + 2;
    const bool parked = (info.ticket & 0xff) == PG_ST_PARKED;
    if (scanned == 0)
        return;
    if (info.ticket >> 8 != 2 || info.key_len != KEY || !is_number(key, 2, 'k') ||
        info.payload_len != (parked ? 0 : PAYLOAD))
        model_fault("a scan trusts a copy of a timer that is half parked");
    else if (!parked && !is_number(key + KEY, 2, 'p'))
        model_fault("a scan trusts a payload that is not stored yet");
}

const struct scenario parked_scenario = {
    "parked", parked_setup, again, {parked_daemon, slot_reader}, true, true, parked_end};

/* ---- commit words of the replay buffer ------------------------------------------------------- */

static uint64_t positions[RING + 2], lost, got, replayed, first, last;

static void notices_make(uint32_t count)
{
    advance(DUE_NS);
    for (uint32_t n = 1; n <= count; n++) {
        arm(n, DUE_NS);
        advance(DUE_NS);
    }
}

/* Makes RING notices, marks them as sent, and arms a timer that is about to fire. */
static void replay_setup(void)
{
    arena_make(false);
    notices_make(RING);
    pg_published(daemon_side, RING, 0, 0);
    arm(RING + 1, DUE_NS);
    made();
    first = 1;
    last = 1;
}

/* The last notice takes the entry of the first notice; the blob of the first notice becomes
 * free. */
static void replay_daemon(void) { advance(DUE_NS); }

static void replay_reader(void)
{
    replayed = pg_replay(reader_side, 0, first, last, positions, out, OUT, &lost, &got);
}

static void replay_end(void)
{
    struct pg_notices head;
    struct pg_notice record;
    if (lost >= first && lost > 1)
        model_fault("a replay reports existing notices as lost");
    if (replayed == 0)
        return;
    memcpy(&head, out, sizeof head);
    const uint8_t *bytes = out + sizeof head + head.count * sizeof record;
    if (head.first != lost + 1 || head.first + head.count != got + 1)
        model_fault("a replay has other positions than its head says");
    for (uint32_t i = 0; i < head.count; i++, bytes += KEY + PAYLOAD) {
        const uint32_t n = (uint32_t)head.first + i;
        memcpy(&record, out + sizeof head + i * sizeof record, sizeof record);
        if (record.ticket != n || record.deadline_ns != DUE_NS || record.key_len != KEY ||
            record.payload_len != PAYLOAD || !is_number(bytes, n, 'k') ||
            !is_number(bytes + KEY, n, 'p'))
            model_fault("a replay trusts a copy of two notices");
    }
}

const struct scenario replay_scenario = {
    "replay", replay_setup, again, {replay_daemon, replay_reader}, true, true, replay_end};

/* ---- a moved blob of a notice ---------------------------------------------------------------- */

static void moved_notice_setup(void)
{
    arena_make(false);
    notices_make(1);
    made();
    first = 1;
    last = 1;
}

const struct scenario moved_notice_scenario = {
    "moved notice", moved_notice_setup, again, {moved_daemon, replay_reader}, true, true,
    replay_end};

/* ---- the newest notice ----------------------------------------------------------------------- */

static void gap_setup(void)
{
    arena_make(false);
    notices_make(2);
    arm(3, DUE_NS);
    made();
    first = 2;
    last = 3;
}

static void gap_daemon(void) { advance(DUE_NS); }

const struct scenario gap_scenario = {
    "gap", gap_setup, again, {gap_daemon, replay_reader}, true, true, replay_end};

/* ---- a reader that sleeps until there is a notice --------------------------------------------- */

static uint32_t *sleep_words[2], sleep_values[2];
static struct pg_known_topic known[2], changed[2];
static uint32_t changed_topics;

static void sleep_again(void)
{
    again();
    changed_topics = 0;
}

static void sleep_end(void)
{
    if (changed_topics == 0)
        model_fault("a notice is visible and its reader sleeps");
}

static void sleep_make(void)
{
    arena_make(false);
    notices_make(1);
    pg_show(daemon_side);
    arm(2, DUE_NS);
    made();
    known[0] = (struct pg_known_topic){topic_at(reader_side, 0)->incarnation, 1, 0, 0};
}

static void sleep_on(uint32_t *word)
{
    sleep_words[0] = &reader_side->header->wake;
    sleep_words[1] = word;
    futex_watch(sleep_words, 2);
}

static void sleep_topic_setup(void)
{
    sleep_make();
    sleep_on(&topic_at(reader_side, 0)->wake);
}

static void sleep_namespace_setup(void)
{
    sleep_make();
    sleep_on(&namespace_at(reader_side, 0)->wake);
}

static void sleep_daemon(void)
{
    advance(DUE_NS);
    pg_show(daemon_side);
}

static void sleep_reader(void)
{
    while (changed_topics == 0) {
        pg_look_at(sleep_words, sleep_values, 2);
        changed_topics = pg_changed_topics(reader_side, 0, NULL, 0, known, changed);
        if (changed_topics == 0)
            pg_sleep(sleep_words, sleep_values, 2, LIMIT_NS);
    }
}

const struct scenario sleep_topic_scenario = {
    "sleep-topic", sleep_topic_setup, sleep_again, {sleep_daemon, sleep_reader}, false, true,
    sleep_end};
const struct scenario sleep_namespace_scenario = {
    "sleep-namespace", sleep_namespace_setup, sleep_again, {sleep_daemon, sleep_reader}, false, true,
    sleep_end};

/* ---- a snapshot of a live arena -------------------------------------------------------------- */

static struct pg_snapshot snapshot;
static uint64_t snapshot_bytes;

static void snapshot_setup(void)
{
    arena_make(true);
    arm(1, 2000);
    advance(3000);
    pg_published(daemon_side, 1, 0, 0);
    arm(2, FAR_NS);
    made();
}

/* Appends two frames: the second timer ends, and the third timer takes its slot and its blob. */
static void snapshot_daemon(void)
{
    uint8_t key[KEY], payload[PAYLOAD];
    const struct pg_put second = put_of(2, 0, key, payload);
    struct pg_result r;
    pg_cancel(daemon_side, &second, 0, &r);
    arm_as(3, 2, FAR_NS);
    wal_buffer_settle(daemon_side);
}

static void snapshot_reader(void)
{
    snapshot = (struct pg_snapshot){0};
    snapshot_bytes = pg_snapshot(reader_side, &snapshot, out, OUT);
}

/* Checks that the LSN range of the snapshot fits its content. `there` is true if the snapshot
 * contains the effect of the daemon's frame with LSN `frame`. */
static void snapshot_judge(bool there, uint64_t frame)
{
    if (there && snapshot.end_lsn < frame)
        model_fault("a snapshot has the effect of a frame after its end LSN");
    if (!there && snapshot.start_lsn > frame)
        model_fault("a snapshot lacks the effect of a frame before its start LSN");
}

/* Return the body of the snapshot's next frame of a type, from `*at` on; NULL = there is none. */
static const void *body_next(enum pg_wal_type type, uint64_t *at)
{
    while (*at < snapshot_bytes) {
        const struct pg_frame_head *f = (const struct pg_frame_head *)(out + *at);
        *at += f->bytes;
        if (f->type == type)
            return f + 1;
    }
    return NULL;
}

static void snapshot_end(void)
{
    bool there[4] = {false};
    const struct pg_wal_arm *body;
    for (uint64_t at = 0; (body = body_next(PG_WAL_ARM, &at)) != NULL;) {
        const uint8_t *key = (const uint8_t *)(body + 1);
        const uint32_t n = (uint32_t)body->ticket;
        if ((n != 2 && n != 3) || body->deadline_ns != FAR_NS || body->key_len != KEY ||
            body->payload_len != PAYLOAD || !is_number(key, 2, 'k') ||
            !is_number(key + KEY, n, 'p'))
            model_fault("a snapshot trusts a half-written timer");
        else
            there[n] = true;
    }
    snapshot_judge(!there[2], lsn);
    snapshot_judge(there[3], lsn + 1);
}

const struct scenario snapshot_scenario = {
    "snapshot", snapshot_setup, again, {snapshot_daemon, snapshot_reader}, true, true,
    snapshot_end};

/* ---- a key that becomes unique while a snapshot copies its slot ------------------------------- */

static void unique_setup(void)
{
    arena_make(true);
    uint8_t key[KEY], payload[PAYLOAD];
    const struct pg_put p = put_of(1, 2000, key, payload);
    const struct pg_ext items[] = {{PG_EXT_LATE, PG_LATE_SKIP, PG_LATE_GRACE_MIN_NS},
                                   {PG_EXT_UNIQUE, 0, LIMIT_NS}};
    struct pg_result r;
    const uint32_t topic = names_topic(daemon_side, (struct name){"n", 1}, (struct name){"t", 1}, &r);
    const uint32_t ns = topic_at(daemon_side, topic)->namespace_row;
    struct put put = {
        .key = {key, key_hash(daemon_side, ns, p.key_type, key, KEY), ns, PG_NIL, KEY, p.key_type},
        .payload = payload, .payload_len = PAYLOAD, .topic = topic, .time_ns = p.time_ns,
        .items = (const uint8_t *)items, .items_len = sizeof items};
    timers_put(daemon_side, &put, &r);
    CHECK(r.ticket >> 8 == 1);
    made();
}

/* The timer is skipped, and its slot keeps the key unique. */
static void unique_daemon(void)
{
    advance(2 * PG_LATE_GRACE_MIN_NS);
    wal_buffer_settle(daemon_side);
}

/* A recovery needs the slot of the timer: no frame after the start of the snapshot has its key. */
static void unique_end(void)
{
    uint64_t at = 0;
    const struct pg_wal_arm *body = body_next(PG_WAL_ARM, &at);
    if (body == NULL) {
        model_fault("a snapshot lacks a timer whose key is unique");
        return;
    }
    const struct items items = {(const uint8_t *)(body + 1), body->ext_len};
    const struct item_text key = {items.at + items.bytes, KEY};
    if (body->ticket != 1 || body->key_len != KEY || !is_number(key.bytes, 1, 'k') ||
        !items_sound(items) || items_unique_ns(items) == 0 ||
        !items_unique_sound(items, &key) || body->payload_len != (body->unique ? 0 : PAYLOAD) ||
        (!body->unique && !is_number(key.bytes + KEY, 1, 'p')))
        model_fault("a snapshot trusts a half-written unique key");
    snapshot_judge(body->unique, lsn);
}

const struct scenario unique_scenario = {
    "unique", unique_setup, again, {unique_daemon, snapshot_reader}, true, true, unique_end};

/* ---- moved blobs that a snapshot copies ------------------------------------------------------ */

/* The blob of the second timer moves, and the third timer gets the blob's old place. */
static void moved_snapshot_daemon(void)
{
    blobs_move(1);
    arm(3, FAR_NS);
    wal_buffer_settle(daemon_side);
}

static void moved_snapshot_end(void)
{
    const struct pg_wal_arm *body;
    for (uint64_t at = 0; (body = body_next(PG_WAL_ARM, &at)) != NULL;) {
        const uint8_t *key = (const uint8_t *)(body + 1);
        const uint32_t n = (uint32_t)body->ticket;
        if (!is_number(key, n, 'k') || !is_number(key + KEY, n, 'p'))
            model_fault("a snapshot has foreign bytes of a timer");
    }
}

const struct scenario moved_snapshot_scenario = {
    "moved snapshot", snapshot_setup, again, {moved_snapshot_daemon, snapshot_reader}, true, true,
    moved_snapshot_end};

static void moved_entry_setup(void)
{
    arena_make(true);
    arm(1, 2000);
    advance(3000);
    made();
}

static void moved_entry_daemon(void)
{
    moved_daemon();
    wal_buffer_settle(daemon_side);
}

static void moved_entry_end(void)
{
    const struct pg_wal_entry *body;
    for (uint64_t at = 0; (body = body_next(PG_WAL_ENTRY, &at)) != NULL;) {
        const uint8_t *key = (const uint8_t *)(body + 1);
        if (!is_number(key, 1, 'k') || !is_number(key + KEY, 1, 'p'))
            model_fault("a snapshot has foreign bytes of a notice");
    }
}

const struct scenario moved_entry_scenario = {
    "moved entry", moved_entry_setup, again, {moved_entry_daemon, snapshot_reader}, true, true,
    moved_entry_end};

/* ---- a watermark that a snapshot copies ------------------------------------------------------ */

static uint32_t watch_key_row(uint8_t mark)
{
    const struct key key = {.bytes = &mark, .len = 1, .type = PG_KEY_BYTES, .row_guess = PG_NIL,
                            .hash = key_hash(daemon_side, 0, PG_KEY_BYTES, &mark, 1)};
    struct pg_result r;
    return watermark_born(daemon_side, &key, false, &r);
}

static void watermark_setup(void)
{
    arena_make(true);
    arm(1, 2000);
    advance(3000);
    pg_published(daemon_side, 1, 0, 0);
    watch_key_row('w');
    wal_buffer_settle(daemon_side);
    made();
}

static void watermark_daemon(void)
{
    watermark_set(daemon_side, 0, 7, 0);
    wal_buffer_settle(daemon_side);
}

static void watermark_end(void)
{
    const struct pg_wal_watermark *body;
    bool there = false;
    for (uint64_t at = 0; (body = body_next(PG_WAL_WATERMARK, &at)) != NULL;)
        there |= body->watermark == 7;
    snapshot_judge(there, lsn);
}

const struct scenario watermark_scenario = {
    "watermark", watermark_setup, again, {watermark_daemon, snapshot_reader}, true, true,
    watermark_end};

/* ---- settings of a namespace that a snapshot copies ------------------------------------------ */

static void namespace_set(const char *name)
{
    struct {
        struct pg_namespace_set set;
        char name[8];
    } message = {{.fields = PG_N_TIMERS, .name_len = (uint32_t)strlen(name), .quota_timers = 77},
                 {0}};
    struct pg_namespace_set now;
    uint64_t detail[2];
    memcpy(message.name, name, strlen(name));
    CHECK(pg_set_namespace(daemon_side, &message, sizeof message.set + strlen(name), 0, &now,
                           detail) == PG_ERR_NONE);
}

/* Appends two frames. The settings are stored before the second frame is appended. */
static void settings_daemon(void)
{
    namespace_set("n");
    watermark_set(daemon_side, 0, 7, 0);
    wal_buffer_settle(daemon_side);
}

static void settings_end(void)
{
    const struct pg_wal_namespace *body;
    bool there = false;
    for (uint64_t at = 0; (body = body_next(PG_WAL_NAMESPACE, &at)) != NULL;)
        there |= body->quota_timers == 77;
    snapshot_judge(there, lsn);
}

const struct scenario settings_scenario = {
    "settings", watermark_setup, again, {settings_daemon, snapshot_reader}, true, true,
    settings_end};

/* ---- a row that gets another topic's name ---------------------------------------------------- */

static uint32_t found_row;

static void topic_arm(const char *name)
{
    uint8_t key[KEY], payload[PAYLOAD];
    struct pg_put put = put_of(9, FAR_NS, key, payload);
    struct pg_result r;
    put.topic_name = name;
    put.topic_len = (uint8_t)strlen(name);
    pg_put(daemon_side, &put, &r);
    CHECK((r.ticket & 0xff) == PG_ST_ADDED);
}

static void topic_setup(void)
{
    uint8_t key[KEY], payload[PAYLOAD];
    const struct pg_put put = put_of(9, 0, key, payload);
    struct pg_result r;
    arena_make(false);
    arm(1, FAR_NS);
    topic_arm("aaaadddd");
    pg_cancel(daemon_side, &put, 0, &r);
    made();
}

static void topic_daemon(void) { topic_arm("ccccbbbb"); }

static void topic_reader(void)
{
    found_row = pg_find_topic(reader_side, 0, "ccccdddd", 8);
}

static void topic_end(void)
{
    if (found_row != PG_NIL)
        model_fault("a reader finds a topic that never existed");
}

const struct scenario topic_scenario = {
    "topic", topic_setup, again, {topic_daemon, topic_reader}, true, true, topic_end};

/* ---- a namespace that is born ---------------------------------------------------------------- */

static void birth_setup(void)
{
    arena_make(false);
    arm(1, FAR_NS);
    made();
}

static void birth_daemon(void) { namespace_set("mmmmmmmm"); }

static void birth_end(void)
{
    const struct pg_wal_namespace *body;
    for (uint64_t at = 0; (body = body_next(PG_WAL_NAMESPACE, &at)) != NULL;)
        if (body->row == 1 && (body->name_len != 8 || memcmp(body + 1, "mmmmmmmm", 8) != 0))
            model_fault("a snapshot has a half-written name");
}

const struct scenario birth_scenario = {
    "birth", birth_setup, again, {birth_daemon, snapshot_reader}, true, true, birth_end};

/* ---- a reader that sleeps until its namespace exists ------------------------------------------ */

static uint32_t named_row;

static void sleep_name_setup(void)
{
    arena_make(false);
    made();
    sleep_words[0] = &reader_side->header->wake;
    futex_watch(sleep_words, 1);
}

static void sleep_name_again(void)
{
    again();
    named_row = PG_NIL;
}

static void sleep_name_daemon(void)
{
    namespace_set("n");
    pg_show(daemon_side);
}

static void sleep_name_reader(void)
{
    while (named_row == PG_NIL) {
        pg_look_at(sleep_words, sleep_values, 1);
        named_row = pg_find_namespace(reader_side, "n", 1);
        if (named_row == PG_NIL)
            pg_sleep(sleep_words, sleep_values, 1, LIMIT_NS);
    }
}

static void sleep_name_end(void)
{
    if (named_row == PG_NIL)
        model_fault("a namespace exists and its reader sleeps");
}

const struct scenario sleep_name_scenario = {
    "sleep-name", sleep_name_setup, sleep_name_again, {sleep_name_daemon, sleep_name_reader}, false,
    true, sleep_name_end};

/* ---- an operation that ends, and another operation that takes its watch records -------------- */

static uint64_t session, sequence;
static uint8_t reply[PG_MESSAGE_MAX];

static void handle(const void *message, uint64_t bytes)
{
    uint64_t used;
    int64_t wait_ns;
    CHECK(pg_handle(daemon_side, message, bytes, 1, 1, 3000, 3000, reply, &used, &wait_ns) ==
          PG_H_REPLY);
}

static void greet(void)
{
    struct {
        struct pg_frame frame;
        struct pg_hello hello;
    } message = {.frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                           .message = PG_M_HELLO}, .hello = {.nonce = {1}}};
    handle(&message, sizeof message);
    memcpy(&session, reply + offsetof(struct pg_frame, session), 8);
    sequence = 0;
}

/* Sends a batch of one record for `key`; a WATCH waits for watch key `watched`. */
static void record_send(unsigned op, char key, char watched, uint64_t value)
{
    struct {
        struct pg_frame frame;
        uint8_t names[8];
        struct pg_record record;
        uint8_t bytes[1 + sizeof(struct pg_watch_key) + 1];
    } message = {.frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                           .message = PG_M_BATCH, .session = session, .sequence = ++sequence,
                           .count = 1, .names = 1, .names_bytes = 8},
                 .names = {1, 1, 'n', 't'},
                 .record = {.op = (uint8_t)op, .mode = PG_C_ALL, .key_type = PG_KEY_BYTES,
                            .key_len = 1}};
    const struct pg_watch_key k = {.target = 5, .key_len = 1, .key_type = PG_KEY_BYTES};
    uint64_t bytes = offsetof(__typeof__(message), bytes) + 1;
    message.bytes[0] = (uint8_t)key;
    if (op == PG_OP_WATCH) {
        message.record.time_kind = PG_T_BOOT;
        message.record.time_ns = FAR_NS;
        message.record.ext_len = sizeof k + 1;
        memcpy(message.bytes + 1, &k, sizeof k);
        message.bytes[1 + sizeof k] = (uint8_t)watched;
        bytes += sizeof k + 1;
    } else {
        message.record.value = value;
    }
    handle(&message, bytes);
    CHECK((((struct pg_result *)(reply + sizeof(struct pg_frame)))->ticket & 0xff) ==
          (op == PG_OP_WATCH ? PG_ST_ADDED : PG_ST_DONE));
}

static void operation_setup(void)
{
    arena_make(false);
    arm(1, 2000);
    advance(3000);
    greet();
    record_send(PG_OP_WATCH, '1', 'v', 0);
    record_send(PG_OP_WATCH, '2', 'w', 0);
    made();
}

static void operation_daemon(void)
{
    sequence = 2;
    record_send(PG_OP_ADVANCE_KEY, 'v', 0, 5);
}

static void operation_end_judge(void)
{
    struct pg_info info;
    for (uint64_t at = 0; at < scanned;) {
        memcpy(&info, out + at, sizeof info);
        const uint8_t *key = out + at + sizeof info + 2;
        const uint8_t *watched = key + 1 + sizeof(struct pg_info_watch);
        if (info.keys != 1 || info.ext_bytes != sizeof(struct pg_info_watch) + 1 ||
            *watched != (*key == '1' ? 'v' : 'w'))
            model_fault("a scan trusts an operation that has lost its watch keys");
        at += sizeof info + 3 + info.ext_bytes;
    }
}

static int64_t ended_ns[2];       /* [slot]: end time of the operation in this slot */

static void outcome_reader(void)
{
    for (uint32_t slot = 0; slot < 2; slot++)
        ended_ns[slot] = pg_outcome_ended_ns(reader_side, slot);
}

static void outcome_end(void)
{
    for (uint32_t slot = 0; slot < 2; slot++)
        if (ended_ns[slot] != NO_WALL && ended_ns[slot] != 3000)
            model_fault("an outcome has a wrong end time");
}

const struct scenario outcome_scenario = {
    "outcome", operation_setup, again, {operation_daemon, outcome_reader}, true, true, outcome_end};

/* ---- an outcome whose owner acknowledges it -------------------------------------------------- */

static void acknowledged_setup(void)
{
    operation_setup();
    record_send(PG_OP_ADVANCE_KEY, 'v', 0, 5);
    made();
}

/* A new timer takes memory that an operation had, and fills it with zeros. */
static void zeros_arm(void)
{
    static const uint8_t payload[31] = {0};
    const struct pg_put put = {.namespace_name = "n", .namespace_len = 1, .topic_name = "t",
                               .topic_len = 1, .key = payload, .key_len = 1, .payload = payload,
                               .key_type = PG_KEY_BYTES, .payload_len = 31, .time_ns = FAR_NS};
    struct pg_result r;
    pg_put(daemon_side, &put, &r);
    CHECK((r.ticket & 0xff) == PG_ST_ADDED);
}

/* The owner acknowledges the outcome, and a new timer takes the memory of the operation. */
static void acknowledged_daemon(void)
{
    struct {
        struct pg_frame frame;
        struct pg_ack ack;
    } message = {.frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION, .message = PG_M_ACK,
                           .session = session, .count = 1},
                 .ack = {.ticket = 2, .slot = 0}};
    uint64_t used;
    int64_t wait_ns;
    pg_handle(daemon_side, &message, sizeof message, 1, 1, 3000, 3000, reply, &used, &wait_ns);
    zeros_arm();
    CHECK(daemon_side->metrics->outcomes == 0);
}

const struct scenario acknowledged_scenario = {
    "acknowledged", acknowledged_setup, again, {acknowledged_daemon, outcome_reader}, true, true,
    outcome_end};

/* ---- a moved blob of an outcome -------------------------------------------------------------- */

static void moved_outcome_setup(void)
{
    arena_make(false);
    arm(1, 2000);
    advance(3000);
    greet();
    record_send(PG_OP_WATCH, '1', 'v', 0);
    record_send(PG_OP_ADVANCE_KEY, 'v', 0, 5);
    made();
}

static void moved_outcome_daemon(void)
{
    blobs_move(1);
    zeros_arm();
}

const struct scenario moved_outcome_scenario = {
    "moved outcome", moved_outcome_setup, again, {moved_outcome_daemon, outcome_reader}, true, true,
    outcome_end};

const struct scenario operation_scenario = {
    "operation", operation_setup, again, {operation_daemon, slot_reader}, true, true,
    operation_end_judge};
