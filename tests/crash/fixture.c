#include "fixture.h"

static uint8_t reply_buffer[PG_MESSAGE_MAX];
static uint8_t out_buffer[1 << 16];

enum { APPENDED_MAX = 57344, LAYOUT = 4711, WATCH_KEYS = 5, KEYS = 6, TICK_NS = 1000 };

static const int64_t OWN_MINUTE_NS = 60000000000;

static uint32_t below(struct fixture *fx, uint64_t bound)
{
    return (uint32_t)rng_below(&fx->rng, bound);
}

/* ---- memory ---------------------------------------------------------------------------- */

static void memory_take(struct fixture *fx)
{
    fx->arena_bytes = pg_arena_bytes(&fx->config);
    fx->secret_bytes = pg_private_bytes(&fx->config);
    fx->arena = zeroed(fx->arena_bytes);
    fx->secret = zeroed(fx->secret_bytes);
    fx->a = malloc(pg_handle_bytes());
    CHECK(fx->a != NULL);
}

void fixture_close(struct fixture *fx)
{
    free(fx->arena);
    free(fx->secret);
    free(fx->a);
}

void fixture_twin(struct fixture *twin, const struct fixture *fx)
{
    *twin = *fx;
    memory_take(twin);
    memcpy(twin->arena, fx->arena, fx->arena_bytes);
    memcpy(twin->secret, fx->secret, fx->secret_bytes);
}

void fixture_for_redo(struct fixture *redo, const struct fixture *fx)
{
    *redo = *fx;
    redo->config.wal_buffer_bytes = 0;
    memory_take(redo);
}

void fixture_blank(struct fixture *fx)
{
    memset(fx->arena, 0, fx->arena_bytes);
    memset(fx->secret, 0, fx->secret_bytes);
    CHECK(pg_create(fx->a, fx->arena, fx->secret, &fx->config));
}

void fixture_commit(struct fixture *fx)
{
    struct pg_wal_buffer *s = pg_wal_buffer_of(fx->a);
    if (s == NULL)
        return;
    s->committed = s->tail;
    s->committed_lsn = s->next_lsn - 1;
}

/* Fill the ring with stale bytes and start near its end, so that frames are padded and wrap
 * around. */
static void wal_buffer_place(struct fixture *fx)
{
    struct pg_wal_buffer *s = pg_wal_buffer_of(fx->a);
    if (s == NULL)
        return;
    memset((uint8_t *)s + PG_WAL_BUFFER_HEAD, 0xa5, s->size);
    s->appended = s->tail = s->committed = s->size - 8 * below(fx, 512);
}

static bool halves_rebuild(struct pg_arena *a, bool places_first, struct pg_fault *why)
{
    return places_first ? rebuild_places(a, why) && rebuild_keys(a, why)
                        : rebuild_keys(a, why) && rebuild_places(a, why);
}

bool fixture_recover(struct fixture *fx, int64_t now_ns, struct pg_fault *why)
{
    fx->now_ns = now_ns;
    return pg_attach(fx->a, fx->arena, fx->arena_bytes, fx->secret, fx->secret_bytes, LAYOUT, why) &&
           rebuild_begin(fx->a, now_ns, why) && halves_rebuild(fx->a, fx->places_first, why) &&
           rebuild_end(fx->a, why);
}

static void piece_add(struct authoritative *t, void *at, uint64_t bytes)
{
    CHECK(t->count < sizeof t->pieces / sizeof t->pieces[0]);
    t->pieces[t->count++] = (struct piece){at, bytes};
    t->bytes += bytes;
}

/* Add the bytes of the ring that a call may append, in two pieces if they wrap around. */
static void wal_buffer_add(struct authoritative *t, const struct fixture *fx)
{
    struct pg_wal_buffer *s = pg_wal_buffer_of(fx->a);
    if (s == NULL)
        return;
    uint8_t *ring = (uint8_t *)s + PG_WAL_BUFFER_HEAD;
    const uint64_t at = s->committed & (s->size - 1), left = s->size - at;
    piece_add(t, s, sizeof *s);
    piece_add(t, ring + at, left < APPENDED_MAX ? left : APPENDED_MAX);
    piece_add(t, ring, left < APPENDED_MAX ? APPENDED_MAX - left : 0);
}

void fixture_authoritative(const struct fixture *fx, struct authoritative *t)
{
    static const enum pg_region_id regions[] = {PG_R_HOT, PG_R_COLD, PG_R_BLOBS, PG_R_NAMESPACES,
                                                PG_R_TOPICS, PG_R_REPLAY_BUFFER, PG_R_WATCHES,
                                                PG_R_WATERMARKS, PG_R_ACCOUNTS, PG_R_TIMESTAMPS,
                                                PG_R_BULK_LOADS,
                                                PG_R_BULK_LOAD_BLOCKS, PG_R_BULK_LOAD_BITS,
                                                PG_R_GROUPS, PG_R_GROUP_TOPICS, PG_R_JOBS,
                                                PG_R_GROUP_CHANGE, PG_R_SCHEDULES};
    const struct pg_header *h = (const struct pg_header *)fx->arena;
    const struct pg_private *s = (const struct pg_private *)fx->secret;
    *t = (struct authoritative){0};
    piece_add(t, fx->arena, sizeof *h);
    for (uint32_t i = 0; i < sizeof regions / sizeof regions[0]; i++)
        piece_add(t, fx->arena + h->regions[regions[i]].offset, h->regions[regions[i]].length);
    wal_buffer_add(t, fx);
    piece_add(t, fx->secret, s->rows_offset + SESSIONS * sizeof(struct pg_session));
    piece_add(t, fx->secret + s->replies_offset,
              SESSIONS * PG_WINDOW * sizeof(struct pg_reply_memory));
    piece_add(t, fx->secret + s->answers_offset, ANSWERS_MAX * sizeof(struct pg_result));
    for (uint32_t i = 0; i < SESSIONS * PG_WINDOW; i++)
        CHECK(answer_granules(&fx->a->replies[i]) == 0 ||
              fx->a->replies[i].answers + fx->a->replies[i].count <= ANSWERS_MAX);
}

/* ---- messages -------------------------------------------------------------------------- */

/* Two topics that are always in use, and a topic that usually does not exist yet. */
static const uint8_t names[16] = "\1\1nt\1\1nu\1\1mv";

struct draft {
    /* Bulk load rows of the records; used only if in_bulk_load. */
    struct pg_rows rows;
    bool in_bulk_load;
    uint32_t count;
    struct pg_record records[RECORDS_MAX];
    uint8_t area[MESSAGE_MAX];
    uint32_t used;
};

static uint8_t *draft_take(struct draft *d, uint32_t bytes)
{
    CHECK(d->used + bytes <= sizeof d->area);
    d->used += bytes;
    return d->area + d->used - bytes;
}

static void frame_write(struct call *call, const struct client *c, unsigned message,
                        uint32_t count, uint64_t sequence)
{
    const struct pg_frame f = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION,
                               .message = (uint16_t)message, .session = c->session,
                               .sequence = sequence, .count = count};
    call->kind = BY_MESSAGE;
    call->uid = c->uid;
    call->records = 0;
    memcpy(call->message, &f, sizeof f);
    call->bytes = sizeof f;
}

static void call_append(struct call *call, const void *bytes, uint32_t len)
{
    CHECK(call->bytes + len <= sizeof call->message);
    memcpy(call->message + call->bytes, bytes, len);
    call->bytes += len;
}

static void batch_write(struct call *call, struct client *c, const struct draft *d,
                        unsigned message)
{
    frame_write(call, c, message, d->count, message == PG_M_BATCH ? c->sequence : 0);
    struct pg_frame *f = (struct pg_frame *)call->message;
    f->names = 3;
    f->names_bytes = sizeof names;
    call->records = d->count;
    f->flags = d->in_bulk_load ? PG_W_BULK_LOAD : 0;
    call_append(call, &d->rows, d->in_bulk_load ? sizeof d->rows : 0);
    call_append(call, names, sizeof names);
    call_append(call, d->records, d->count * sizeof d->records[0]);
    call_append(call, d->area, d->used);
}

/* Return the number of bytes before the records of a batch. */
static uint32_t fixed_bytes(const struct call *call)
{
    const struct pg_frame *f = (const struct pg_frame *)call->message;
    return (uint32_t)(sizeof *f + (f->flags & PG_W_BULK_LOAD ? sizeof(struct pg_rows) : 0) +
                      sizeof names);
}

void call_prefix(const struct call *whole, uint32_t records, struct call *prefix)
{
    const uint32_t fixed = fixed_bytes(whole);
    const struct pg_record *r = (const struct pg_record *)(whole->message + fixed);
    const uint8_t *area = (const uint8_t *)(r + whole->records);
    uint32_t used = 0;
    for (uint32_t i = 0; i < records; i++)
        used += r[i].key_len + r[i].payload_len + r[i].ext_len;
    *prefix = *whole;
    ((struct pg_frame *)prefix->message)->count = prefix->records = records;
    prefix->bytes = fixed + records * (uint32_t)sizeof *r;
    call_append(prefix, area, used);
}

static bool parks_any(const struct pg_arena *a)
{
    bool parks = false;
    for (uint32_t i = 0; i < a->namespace_rows; i++)
        parks |= a->namespaces[i].park_beyond_ns != 0;
    return parks;
}

/* Return whether the end of a job sets the time of an occurrence. */
static bool delays_any(const struct pg_arena *a)
{
    bool delays = false;
    for (uint32_t row = 0; row < a->schedule_rows; row++)
        delays |= schedule_fields(a, row)->overlap == PG_OVERLAP_DELAY;
    return delays;
}

/* Return whether the time of a PUT decides whether a unique key admits it. */
static bool uniques_any(const struct pg_arena *a)
{
    bool uniques = false;
    for (uint32_t i = 0; i < a->slots.capacity; i++)
        uniques |= ctl_counted(a->slots.hot[i].ctl) && slot_unique(a, i) != NULL;
    return uniques;
}

/* Return whether a PUT has the item UNIQUE, which is the last one. `ext_end`: the end of its items. */
static bool makes_unique(const struct pg_record *r, const uint8_t *ext_end)
{
    struct pg_ext last = {0};
    if (r->op == PG_OP_PUT && r->ext_len != 0)
        memcpy(&last, ext_end - sizeof last, sizeof last);
    return last.kind == PG_EXT_UNIQUE;
}

bool call_minds_when(const struct fixture *fx, const struct call *call)
{
    const struct pg_record *r = (const struct pg_record *)(call->message + fixed_bytes(call));
    const uint8_t *area = (const uint8_t *)(r + call->records);
    const bool decides = parks_any(fx->a) || uniques_any(fx->a);
    bool minds = delays_any(fx->a);
    minds |= ((const struct pg_frame *)call->message)->message == PG_M_SCHEDULE;
    for (uint32_t i = 0; call->kind == BY_MESSAGE && i < call->records; i++) {
        area += r[i].key_len + r[i].payload_len + r[i].ext_len;
        minds |= r[i].time_kind == PG_T_DELAY || (decides && r[i].op == PG_OP_PUT) ||
                 r[i].op >= PG_OP_JOIN || makes_unique(&r[i], area);
    }
    return minds || call->kind == BY_SERVE || call->kind == BY_AWAY;
}

/* ---- records ---------------------------------------------------------------------------- */

static uint32_t some_key(struct fixture *fx)
{
    return below(fx, fx->shape == SHARED_KEY ? 2 : fx->shape == FULL ? 2 * fx->config.capacity : KEYS);
}

static uint8_t key_write(const struct fixture *fx, uint8_t *at, uint32_t key)
{
    const uint8_t len = (uint8_t)(1 + (key * 7 + fx->lengths) % 40);
    memset(at, (int)('a' + key), len);
    return len;
}

/* Write a watch key. Keys with an odd index are too long to be stored in their row. */
static uint8_t watch_key_write(const struct fixture *fx, uint8_t *at, uint32_t key)
{
    const uint8_t len = key % 2 ? 20 : (uint8_t)(1 + fx->lengths % 16);
    memset(at, (int)('A' + key), len);
    return len;
}

static struct pg_record *record_new(struct fixture *fx, struct draft *d, unsigned op,
                                    bool on_watermark)
{
    uint8_t key[64];
    const uint32_t watch_keys = fx->shape == SHARED_KEY ? 1 : WATCH_KEYS;
    const uint8_t len = on_watermark ? watch_key_write(fx, key, below(fx, watch_keys))
                                     : key_write(fx, key, some_key(fx));
    memcpy(draft_take(d, len), key, len);
    CHECK(d->count < RECORDS_MAX);
    struct pg_record *r = &d->records[d->count++];
    *r = (struct pg_record){.op = (uint8_t)op, .key_type = PG_KEY_BYTES, .key_len = len,
                            .name = (uint16_t)(below(fx, 16) == 0 ? 2 : below(fx, 2))};
    return r;
}

static void payload_add(struct fixture *fx, struct draft *d, struct pg_record *r)
{
    r->payload_len = below(fx, 64) == 0 && d->used < 1000 ? 41000 : below(fx, 3) * (1 + fx->lengths);
    memset(draft_take(d, r->payload_len), 'p', r->payload_len);
}

static int64_t some_delay(struct fixture *fx)
{
    if (fx->shape == SHARED_BUCKET)
        return 5 * TICK_NS;
    return below(fx, 8) == 0 ? -(int64_t)below(fx, TICK_NS)
                            : (int64_t)(rng_next(&fx->rng) >> (24 + below(fx, 30)));
}

/* Return the flags of an add: a part of the timers has a slack of up to a second. Timers of one
 * bucket have none, because it moves them to other buckets. */
static uint8_t slack_flags(const struct fixture *fx, int64_t delay_ns)
{
    const bool has = fx->shape != SHARED_BUCKET && delay_ns % 4 == 0;
    return has ? (uint8_t)(1 + (uint64_t)delay_ns / 4 % 31) : 0;
}

/* Give a tag to a part of the timers. */
static void tag_add(struct draft *d, struct pg_record *r)
{
    const uint32_t len = r->key_len % 3 * 9;
    const struct pg_ext item = {.kind = PG_EXT_TAG, .extra = len};
    if (len == 0)
        return;
    r->ext_len = (uint32_t)(sizeof item + (len + PG_GRANULE - 1) / PG_GRANULE * PG_GRANULE);
    uint8_t *at = draft_take(d, r->ext_len);
    memset(at, 0, r->ext_len);
    memcpy(at, &item, sizeof item);
    memset(at + sizeof item, 't', len);
}

/* Add the item that refuses other adds of the key for a time, which often ends after the firing. */
static void unique_add(struct fixture *fx, struct draft *d, struct pg_record *r, int64_t delay)
{
    const int64_t for_ns = (delay > 0 && delay < INT64_MAX / 4 ? delay : 0) +
                           (int64_t)below(fx, 8) * TICK_NS;
    const struct pg_ext item = {
        .kind = PG_EXT_UNIQUE,
        .value = for_ns == 0 || for_ns > PG_UNIQUE_MAX_NS ? PG_UNIQUE_MAX_NS : for_ns};
    memcpy(draft_take(d, sizeof item), &item, sizeof item);
    r->ext_len += (uint32_t)sizeof item;
}

static void put_draft(struct fixture *fx, struct draft *d, unsigned mode)
{
    struct pg_record *r = record_new(fx, d, PG_OP_PUT, false);
    const int64_t delay = some_delay(fx);
    r->mode = (uint8_t)mode;
    r->time_kind = (uint8_t)(below(fx, 3) == 0 ? below(fx, PG_T_KINDS) : PG_T_BOOT);
    r->time_ns = r->time_kind == PG_T_DELAY  ? delay
                 : r->time_kind == PG_T_WALL ? fx->now_ns + fx->offset_ns + delay
                                             : fx->now_ns + delay;
    r->flags = slack_flags(fx, delay);
    payload_add(fx, d, r);
    tag_add(d, r);
    if (below(fx, 6) == 0)
        unique_add(fx, d, r, delay);
}

static void watch_key_add(struct fixture *fx, struct draft *d, struct pg_record *r, uint32_t key)
{
    uint8_t bytes[64];
    const bool sum = r->mode == PG_C_SUM;
    struct pg_watch_key k = {.key_len = watch_key_write(fx, bytes, key), .key_type = PG_KEY_BYTES,
                             .target = sum && below(fx, 2) ? UINT64_MAX : 1 + below(fx, 4),
                             .cap = sum ? 1 + below(fx, 4) : 0,
                             .flags = below(fx, 4) == 0 ? PG_WK_OWN : 0};
    memcpy(draft_take(d, sizeof k), &k, sizeof k);
    memcpy(draft_take(d, k.key_len), bytes, k.key_len);
    r->ext_len += (uint32_t)sizeof k + k.key_len;
}

static void watch_draft(struct fixture *fx, struct draft *d, unsigned condition)
{
    struct pg_record *r = record_new(fx, d, PG_OP_WATCH, false);
    const uint32_t first = below(fx, WATCH_KEYS), keys = 1 + below(fx, 3);
    r->mode = (uint8_t)condition;
    r->flags = (uint8_t)below(fx, 2);
    r->time_ns = fx->now_ns + some_delay(fx);
    payload_add(fx, d, r);
    r->value = condition == PG_C_SUM      ? 1 + below(fx, 5)
               : condition == PG_C_QUORUM ? 1 + below(fx, keys)
                                          : 0;
    for (uint32_t i = 0; i < keys; i++)
        watch_key_add(fx, d, r, fx->shape == SHARED_BUCKET ? i : (first + i) % WATCH_KEYS);
}

/* Replace the key of the last record with the bytes of a watch key. All bytes of a watch key are
 * equal. */
static void watch_key_take(struct draft *d, struct pg_record *r, const uint8_t *key)
{
    const struct pg_watch_key *k = (const struct pg_watch_key *)key - 1;
    d->used -= r->key_len;
    r->key_len = k->key_len;
    memcpy(draft_take(d, k->key_len), key, k->key_len);
}

static void watermark_draft(struct fixture *fx, struct draft *d, unsigned op)
{
    struct pg_record *r = record_new(fx, d, op, true);
    r->value = op == PG_OP_ADVANCE_KEY ? 1 + below(fx, 6)
               : op == PG_OP_BUMP      ? (below(fx, 16) == 0 ? PG_WATERMARK_MAX : 1 + below(fx, 2))
               : op == PG_OP_FAIL      ? 7
                                       : 0;
}

/* Usually replace the record's key with the key of an armed or parked timer or operation, if there
 * is one. */
static void aim(struct fixture *fx, struct draft *d, struct pg_record *r, bool client_only)
{
    const uint32_t from = below(fx, fx->a->slots.capacity);
    for (uint32_t i = 0; i < fx->a->slots.capacity && below(fx, 8) != 0; i++) {
        const uint32_t slot = (from + i) % fx->a->slots.capacity;
        const struct pg_cold *c = &fx->a->slots.cold[slot];
        if (!ctl_live(fx->a->slots.hot[slot].ctl) || slot_namespace(fx->a, slot) != 0 ||
            (client_only && (!is_operation(fx->a, slot) ||
                             operation_at(fx->a, slot)->condition != PG_C_CLIENT)))
            continue;
        d->used -= r->key_len;
        memcpy(draft_take(d, c->key_len), blob_at(&fx->a->blobs, c->blob) + c->ext_len, c->key_len);
        r->key_len = c->key_len;
        r->name = 0;
        if (client_only)
            r->value = operation_at(fx->a, slot)->version;
        else if (below(fx, 4) == 0)
            r->value = ctl_ticket(fx->a->slots.hot[slot].ctl);
        return;
    }
}

static void cancel_draft(struct fixture *fx, struct draft *d)
{
    aim(fx, d, record_new(fx, d, PG_OP_CANCEL, false), false);
}

/* Add an UNPARK record for a parked timer, if there is one. Sometimes the record has a ticket that
 * was never issued. */
static void unpark_draft(struct fixture *fx, struct draft *d)
{
    struct pg_record *r = record_new(fx, d, PG_OP_UNPARK, false);
    const uint32_t from = below(fx, fx->a->slots.capacity);
    r->value = PG_TICKET_MAX - below(fx, 4);
    for (uint32_t i = 0; i < fx->a->slots.capacity; i++) {
        const uint32_t slot = (from + i) % fx->a->slots.capacity;
        const struct pg_cold *c = &fx->a->slots.cold[slot];
        if (!is_parked(fx->a, slot) || slot_namespace(fx->a, slot) != 0)
            continue;
        d->used -= r->key_len;
        memcpy(draft_take(d, c->key_len), blob_at(&fx->a->blobs, c->blob) + c->ext_len, c->key_len);
        r->key_len = c->key_len;
        r->name = 0;
        if (below(fx, 8) != 0)
            r->value = ctl_ticket(fx->a->slots.hot[slot].ctl);
        break;
    }
    payload_add(fx, d, r);
}

static void complete_draft(struct fixture *fx, struct draft *d)
{
    aim(fx, d, record_new(fx, d, PG_OP_COMPLETE, false), true);
}

enum { BULK_LOAD_IDS = 4, BULK_LOADS = 3, BULK_LOAD_BLOCKS = 3 };

static void bulk_load_id(struct fixture *fx, uint8_t id[16])
{
    memset(id, (int)(1 + below(fx, BULK_LOAD_IDS)), 16);
}

/* Add bulk load rows on both sides of a block's end, in more blocks than the arena has. */
static void rows_draft(struct fixture *fx, struct draft *d, uint32_t records, unsigned modes)
{
    static const uint64_t first[] = {0, 3, PG_BULK_LOAD_BLOCK_ROWS - 2,
                                     5 * PG_BULK_LOAD_BLOCK_ROWS};
    d->in_bulk_load = true;
    d->rows = (struct pg_rows){.first_row = first[below(fx, 4)] + below(fx, 3),
                               .fencing_token = below(fx, 4) == 0 ? below(fx, 3) : 1};
    bulk_load_id(fx, d->rows.bulk_load);
    for (; records > 0; records--)
        if (below(fx, 4) == 0)
            cancel_draft(fx, d);
        else if (below(fx, 4) == 0)
            unpark_draft(fx, d);
        else
            put_draft(fx, d, modes == PG_MODES ? below(fx, PG_MODES) : modes);
}

/* ---- consumer groups -------------------------------------------------------------------- */

enum { GROUPS = 3, JOBS_EACH = 24, CREDITS = 60 };

/* Add a record on a lease of the client, if it has one. */
static void job_draft(struct fixture *fx, struct draft *d, const struct client *c, unsigned op)
{
    static const char errors[] = "an error text that does not fit into two granules of memory";
    const uint32_t rows = fx->a->job_slots.capacity, from = below(fx, rows);
    struct pg_lease lease = {1, 0, 1};
    struct pg_record *r = record_new(fx, d, op, false);
    for (uint32_t i = 0; i < rows; i++) {
        const struct pg_job *j = &fx->a->jobs[(from + i) % rows];
        if (job_state(j) != PG_JOB_LEASED || j->session != c->session)
            continue;
        lease = (struct pg_lease){j->ticket >> 8, (from + i) % rows,
                                  job_leases(j) - (below(fx, 16) == 0)};
        break;
    }
    d->used -= r->key_len;
    memcpy(draft_take(d, sizeof lease), &lease, sizeof lease);
    r->key_len = sizeof lease;
    r->name = 0;
    if (op == PG_OP_JOB_NACK)
        r->time_ns = (int64_t)below(fx, 3) * 7 * TICK_NS - 1 + (below(fx, 3) != 0);
    if (op == PG_OP_JOB_EXTEND)
        r->time_ns = 1 + (int64_t)below(fx, 50) * TICK_NS;
    if (op == PG_OP_JOB_NACK || op == PG_OP_JOB_REJECT)
        r->payload_len = below(fx, 2) * below(fx, sizeof errors);
    memcpy(draft_take(d, r->payload_len), errors, r->payload_len);
}

/* Add a CANCEL that ends the jobs of a key that nobody holds. Usually the key has a job. */
static void cancel_delivered_draft(struct fixture *fx, struct draft *d)
{
    const uint32_t rows = fx->a->job_slots.capacity, from = below(fx, rows);
    struct pg_record *r = record_new(fx, d, PG_OP_CANCEL, false);
    r->flags = below(fx, 8) != 0;
    for (uint32_t i = 0; i < rows; i++) {
        const struct pg_job *j = &fx->a->jobs[(from + i) % rows];
        if (job_state(j) == PG_JOB_FREE || (j->meta & 7) != PG_KEY_BYTES)
            continue;
        d->used -= r->key_len;
        memcpy(draft_take(d, j->key_len), blob_at(&fx->a->blobs, j->blob), j->key_len);
        r->key_len = j->key_len;
        r->name = 0;
        r->value = below(fx, 3) == 0 ? j->ticket >> 8 : 0;
        return;
    }
}

static void any_job_draft(struct fixture *fx, struct draft *d, const struct client *c)
{
    if (below(fx, 6) == 0)
        cancel_delivered_draft(fx, d);
    else
        job_draft(fx, d, c, PG_OP_JOB_ACK + below(fx, 5));
}

static struct pg_group_settings some_settings(struct fixture *fx, uint32_t group)
{
    const bool ordered = group % 2 == 1;
    return (struct pg_group_settings){
        .max_jobs = JOBS_EACH, .max_bytes = below(fx, 4) == 0 ? 16384 : 0,
        .retention_ns = below(fx, 3) == 0 ? 500 * TICK_NS : 0, .max_lease_ns = 400 * TICK_NS,
        .backoff_base_ns = below(fx, 2) * 16 * TICK_NS, .backoff_cap_ns = 64 * TICK_NS,
        .max_attempts = 1 + below(fx, 3), .max_dead = below(fx, 2) * 40,
        .flags = (ordered ? PG_G_ORDERED : 0u) | (ordered && below(fx, 2) ? PG_G_BLOCK : 0u) |
                 (below(fx, 4) == 0 ? PG_G_DROP_OLDEST : 0u)};
}

/* Write a GROUP message. The groups have the names a, b and c, in the namespace n. */
static void group_message(struct fixture *fx, struct call *call, unsigned action, uint32_t group)
{
    const bool creates = action == PG_GA_CREATE;
    struct pg_group_ask ask = {.action = action, .topics = creates ? 1 + group % 2 : 0,
                               .namespace_len = 1, .name_len = 1,
                               .earliest = creates && below(fx, 2)};
    if (creates || action == PG_GA_CHANGE)
        ask.settings = some_settings(fx, group);
    frame_write(call, &fx->clients[0], PG_M_GROUP, 0, 0);
    call_append(call, &ask, sizeof ask);
    call_append(call, "n", 1);
    call_append(call, &"abc"[group % GROUPS], 1);
    call_append(call, "\1t\1u", creates ? 2 * ask.topics : 0);
}

static void dead_write(struct fixture *fx, struct call *call, unsigned action)
{
    const uint32_t rows = fx->a->job_slots.capacity, from = below(fx, rows);
    struct pg_dead_ask ask = {.action = action, .most = 2, .namespace_len = 1, .name_len = 1};
    uint32_t group = below(fx, GROUPS);
    for (uint32_t i = 0; i < rows; i++) {
        const struct pg_job *j = &fx->a->jobs[(from + i) % rows];
        if (job_state(j) != PG_JOB_DEAD)
            continue;
        group = (uint32_t)(group_at(fx->a, j->group)->name[0] - 'a');
        ask.ticket = below(fx, 2) ? j->ticket >> 8 : 0;
        break;
    }
    frame_write(call, &fx->clients[0], PG_M_DEAD, 0, 0);
    call_append(call, &ask, sizeof ask);
    call_append(call, "n", 1);
    call_append(call, &"abc"[group], 1);
}

/* Lease all jobs that can be leased to a session. Members are derived, so the session joins before
 * and gets no further jobs afterwards. */
static void serve_run(struct fixture *fx, uint64_t session)
{
    for (uint32_t group = 0; group < fx->a->group_rows; group++)
        if (group_exists(fx->a, group) && group_at(fx->a, group)->incarnation != 0)
            member_join(fx->a, session, group, CREDITS, 30 * TICK_NS);
    while (members_serve(fx->a, 2))
        continue;
    wal_buffer_settle(fx->a);
    for (uint32_t group = 0; group < fx->a->group_rows; group++)
        if (group_exists(fx->a, group) && group_at(fx->a, group)->incarnation != 0)
            member_join(fx->a, session, group, 0, 30 * TICK_NS);
}

static void any_draft(struct fixture *fx, struct draft *d)
{
    switch (below(fx, 10)) {
    case 0: case 1: case 2: put_draft(fx, d, below(fx, PG_MODES)); break;
    case 3: below(fx, 3) == 0 ? unpark_draft(fx, d) : cancel_draft(fx, d); break;
    case 4: case 5: watch_draft(fx, d, below(fx, PG_CONDITIONS)); break;
    case 6: watermark_draft(fx, d, PG_OP_ADVANCE_KEY); break;
    case 7: complete_draft(fx, d); break;
    default: watermark_draft(fx, d, PG_OP_ADVANCE_KEY + below(fx, 6)); break;
    }
}

/* ---- schedules ------------------------------------------------------------------------------ */

enum { SCHEDULE_ROWS = 3, SCHEDULE_KEYS = 4 };
static const int64_t EVEN_NS = 2000000;

void fixture_answer(struct fixture *fx)
{
    struct pg_question q;
    int64_t times[PG_NOMINAL_MAX];
    for (uint32_t tries = 0; tries < 64 && pg_schedule_question(fx->a, &q); tries++) {
        uint32_t count = 0;
        int64_t at = (q.after_ns / EVEN_NS + 1) * EVEN_NS;
        for (; count < q.count && count < PG_NOMINAL_MAX && at <= q.until_ns; at += EVEN_NS)
            times[count++] = at;
        pg_schedule_answer(fx->a, &q, PG_ST_DONE, times, count);
    }
}

static bool has_schedules(const struct fixture *fx) { return fx->a->metrics->schedules != 0; }

/* ---- running ---------------------------------------------------------------------------- */

static bool message_run(struct fixture *fx, const struct call *call, struct reply *reply)
{
    /* A schedule is stored before its occurrence is armed. */
    bool again = ((const struct pg_frame *)call->message)->message == PG_M_SCHEDULE;
    int64_t wait_ns;
    for (uint32_t tries = 0; tries < 8; tries++) {
        const int done = pg_handle(fx->a, call->message, call->bytes, call->uid, 1, call->real_ns,
                                   call->real_ns, reply_buffer, &reply->bytes, &wait_ns);
        if (done != PG_H_AGAIN)
            break;
        fixture_answer(fx);
        again = true;
        pg_published(fx->a, fx->a->header->replay_tail, 0, 0);
    }
    CHECK(reply->bytes <= sizeof reply->body);
    memcpy(reply->body, reply_buffer, reply->bytes);
    return again;
}

static bool advance_run(struct fixture *fx, const struct call *call)
{
    bool again = has_schedules(fx);  /* several occurrences of a schedule may come due */
    int more = 1;
    fx->now_ns = call->now_ns;
    fx->offset_ns = call->offset_ns;
    for (uint32_t tries = 0; tries < 40 && more; tries++) {
        pg_advance(fx->a, call->now_ns, call->offset_ns, call->real_ns, 3, &more);
        fixture_answer(fx);
        more |= pg_next_ns(fx->a) <= call->now_ns && has_schedules(fx);
        if (fx->a->header->replay_tail - fx->a->header->published < fx->config.replay_capacity)
            continue;
        again = true;
        pg_published(fx->a, fx->a->header->replay_tail, 0, 0);
    }
    return again;
}

/* Empty the first three quarters of the used memory. */
static void compaction_run(struct fixture *fx)
{
    compaction_begin(fx->a, 0, (uint32_t)(blobs_used(&fx->a->blobs) * 3 / 4 + 1));
    while (compaction_step(fx->a))
        continue;
}

/* Migrate into a new arena. The old arena must not change. */
static void migrate_run(struct fixture *fx)
{
    struct fixture to = {.config = fx->config};
    struct pg_fault why;
    to.config.capacity += 3;
    memory_take(&to);
    CHECK(pg_create(to.a, to.arena, to.secret, &to.config) && pg_migrate(to.a, fx->a, &why));
    fixture_close(&to);
}

static void settings_run(struct fixture *fx, const struct call *call)
{
    struct pg_namespace_set now;
    uint64_t detail[2];
    CHECK_EQUAL(pg_set_namespace(fx->a, call->message, call->bytes, call->uid, &now, detail), PG_ERR_NONE);
}

static void topic_run(struct fixture *fx, const struct call *call)
{
    struct pg_result result;
    uint64_t detail[2];
    CHECK_EQUAL(pg_set_topic(fx->a, call->message, call->bytes, call->uid, &result, detail),
                PG_ERR_NONE);
}

/* Publish once. A publisher that does not know whether its publish succeeded looks into the replay
 * buffer before it publishes again. */
static void publish_run(struct fixture *fx, const struct call *call)
{
    struct pg_result result;
    uint64_t detail[2];
    if (fx->a->header->replay_tail == call->tail)
        CHECK(pg_publish(fx->a, call->message, call->bytes, call->uid, call->real_ns, &result,
                         detail) == PG_ERR_NONE);
}

bool call_run(struct fixture *fx, const struct call *call, struct reply *reply)
{
    uint64_t session;
    uint32_t cursor = 0;
    reply->bytes = 0;
    if (call->draining)
        pg_drain(fx->a, 1);
    switch (call->kind) {
    case BY_MESSAGE: return message_run(fx, call, reply);
    case BY_ADVANCE: return advance_run(fx, call);
    case BY_PUBLISHED: pg_published(fx->a, fx->a->header->replay_tail, 0, 0); break;
    case BY_PUBLISH: publish_run(fx, call); break;
    case BY_SWEEP: pg_sweep(fx->a, call->real_ns, &cursor, UINT32_MAX); break;
    case BY_SWEEP_BULK_LOADS:
        for (uint32_t i = 0; i < BULK_LOADS; i++)
            pg_bulk_loads_sweep(fx->a, call->real_ns, OWN_MINUTE_NS);
        break;
    case BY_INBOX:
        pg_inbox(fx->a, &session, out_buffer, sizeof out_buffer);
        pg_notified(fx->a, 0, 0);
        break;
    case BY_INBOX_AGAIN: pg_inbox_again(fx->a, call->real_ns); break;
    case BY_SETTINGS: settings_run(fx, call); break;
    case BY_TOPIC: topic_run(fx, call); break;
    case BY_MIGRATE: migrate_run(fx); break;
    case BY_COMPACTION: compaction_run(fx); break;
    case BY_SERVE: serve_run(fx, call->session); break;
    case BY_AWAY: pg_inbox_away(fx->a, call->session); break;
    case BY_RECHECK: pg_schedules_recheck(fx->a); fixture_answer(fx); break;
    }
    return false;
}

static void past(struct fixture *fx, uint32_t steps);
static void plain_make(struct fixture *fx, struct call *call, unsigned kind);

/* ---- the operations under test ------------------------------------------------------------ */

static void batch_make(struct fixture *fx, struct call *call, const struct draft *d)
{
    batch_write(call, &fx->clients[below(fx, CLIENTS)], d, PG_M_BATCH);
}

static void put_make(struct fixture *fx, struct call *call, unsigned mode)
{
    struct draft d = {.count = 0};
    put_draft(fx, &d, mode);
    if (mode != PG_MODE_ERROR && below(fx, 2)) {   /* use the key of an armed timer or operation */
        struct draft cancel = {.count = 0};
        cancel_draft(fx, &cancel);
        struct pg_record *r = &d.records[0];
        memmove(d.area + cancel.used, d.area + r->key_len, r->payload_len);
        memcpy(d.area, cancel.area, cancel.used);
        d.used = cancel.used + r->payload_len;
        r->key_len = (uint8_t)cancel.used;
        r->name = 0;
    }
    batch_make(fx, call, &d);
}

static void parks_far(struct fixture *fx)
{
    struct {
        struct pg_namespace_set set;
        char name;
    } ask = {{.fields = PG_N_PARK, .name_len = 1, .park_beyond_ns = 20 * TICK_NS}, 'n'};
    struct pg_namespace_set now;
    uint64_t detail[2];
    CHECK_EQUAL(pg_set_namespace(fx->a, &ask, sizeof ask.set + 1, PG_NIL, &now, detail), PG_ERR_NONE);
}

/* Park a timer for each client, so that an UNPARK record can come from the timer's owner. */
static void park_some(struct fixture *fx)
{
    struct call call = {.real_ns = fx->real_ns};
    struct reply reply;
    if (pg_wal_buffer_of(fx->a) == NULL)
        return;
    parks_far(fx);
    for (uint32_t n = 0; n < CLIENTS; n++) {
        struct draft d = {.count = 0};
        put_draft(fx, &d, PG_MODE_REPLACE);
        d.records[0].name = 0;
        d.records[0].time_kind = PG_T_BOOT;
        d.records[0].time_ns = fx->now_ns + 100 * TICK_NS;
        batch_write(&call, &fx->clients[n], &d, PG_M_BATCH);
        call_run(fx, &call, &reply);
        fx->clients[n].sequence++;
    }
}

static void unpark_make(struct fixture *fx, struct call *call, unsigned in_bulk_load)
{
    park_some(fx);
    struct draft d = {.in_bulk_load = in_bulk_load != 0,
                      .rows = {.first_row = below(fx, 6), .fencing_token = 2}};
    bulk_load_id(fx, d.rows.bulk_load);
    unpark_draft(fx, &d);
    batch_make(fx, call, &d);
}

static void rows_make(struct fixture *fx, struct call *call, unsigned mode)
{
    struct draft d = {.count = 0};
    rows_draft(fx, &d, 1, mode);
    batch_make(fx, call, &d);
}

static void bulk_load_make(struct fixture *fx, struct call *call, unsigned unused)
{
    struct draft d = {.count = 0};
    (void)unused;
    rows_draft(fx, &d, 2 + below(fx, 5), PG_MODES);
    batch_make(fx, call, &d);
}

static void bulk_load_ask_make(struct fixture *fx, struct call *call, unsigned action)
{
    const bool named = action == PG_LA_OPEN || action == PG_LA_CLOSE;
    struct pg_bulk_load_ask ask = {.action = action, .name_len = named,
                                   .fencing_token = named ? below(fx, 4) : 0};
    bulk_load_id(fx, ask.bulk_load);
    frame_write(call, &fx->clients[below(fx, CLIENTS)], PG_M_BULK_LOAD, 0, 0);
    call_append(call, &ask, sizeof ask);
    call_append(call, "n", named);
}

static void sweep_bulk_loads_make(struct fixture *fx, struct call *call, unsigned unused)
{
    (void)unused;
    call->kind = BY_SWEEP_BULK_LOADS;
    fx->real_ns += 2 * OWN_MINUTE_NS;
}

/* Make a message about a random schedule. Each schedule ends after a few occurrences. */
static void schedule_write(struct fixture *fx, struct call *call, unsigned action)
{
    const bool puts = action == PG_SA_PUT, cron = below(fx, 2);
    const int64_t now_ns = fx->now_ns + fx->offset_ns;
    struct pg_schedule_ask ask = {.action = (uint8_t)action, .namespace_len = 1, .key_len = 3};
    if (puts) {
        ask.topic_len = 1;
        ask.count = 1 + below(fx, 3);
        ask.until = now_ns + (below(fx, 4) == 0 ? 0 : 100 * EVEN_NS);
        ask.every_ns = cron ? 0 : 1000000 * (1 + (int64_t)below(fx, 3));
        ask.spec_len = cron ? 1 + below(fx, 2) : 0;
        ask.jitter_ns = below(fx, 3) == 0 ? EVEN_NS : 0;
        ask.overlap = (uint8_t)below(fx, cron ? PG_OVERLAP_DELAY : PG_OVERLAPS);
        ask.payload_len = below(fx, 3) * (1 + fx->lengths);
        ask.tag_len = below(fx, 3) == 0 ? 1 + below(fx, 2) : 0;
        ask.has_priority = below(fx, 3) == 0;
        ask.priority = ask.has_priority ? (uint8_t)below(fx, PG_PRIORITY_MAX + 1) : 0;
    } else if (action == PG_SA_TRIGGER) {
        ask.from = now_ns - below(fx, 2);
    } else if (action == PG_SA_BACKFILL) {
        ask.from = now_ns - 3 * EVEN_NS;
        ask.until = now_ns;
    }
    frame_write(call, &fx->clients[below(fx, CLIENTS)], PG_M_SCHEDULE, 0, 0);
    call_append(call, &ask, sizeof ask);
    call_append(call, "n", 1);
    call_append(call, "t", ask.topic_len);
    uint8_t key[3];
    memset(key, (int)('s' + below(fx, SCHEDULE_KEYS)), sizeof key);
    call_append(call, key, sizeof key);
    call_append(call, "**", ask.spec_len);
    call_append(call, "##", ask.tag_len);
    memset(key, 'p', sizeof key);
    for (uint32_t n = 0; n < ask.payload_len; n++)
        call_append(call, key, 1);
}

/* Make a message about a schedule. Usually the schedule exists, because it was put before. */
static void schedule_make(struct fixture *fx, struct call *call, unsigned action)
{
    struct reply reply;
    const struct rng rng = fx->rng;
    schedule_write(fx, call, PG_SA_PUT);
    call->real_ns = fx->real_ns;
    if (below(fx, 4) != 0)
        call_run(fx, call, &reply);
    if (action != PG_SA_PUT) {
        schedule_write(fx, call, action);
        memcpy(call->message + sizeof(struct pg_frame) + sizeof(struct pg_schedule_ask) + 1, "sss",
               3);
        return;
    }
    if (below(fx, 2))
        fx->rng = rng;            /* put the same schedule again, or the same key */
    schedule_write(fx, call, PG_SA_PUT);
}

static void recheck_make(struct fixture *fx, struct call *call, unsigned unused)
{
    (void)unused;
    schedule_make(fx, call, PG_SA_PUT);
    *call = (struct call){.kind = BY_RECHECK};
}

static void watch_make(struct fixture *fx, struct call *call, unsigned condition)
{
    struct draft d = {.count = 0};
    watch_draft(fx, &d, condition);
    batch_make(fx, call, &d);
}

static void watermark_make(struct fixture *fx, struct call *call, unsigned op)
{
    struct draft d = {.count = 0};
    watermark_draft(fx, &d, op);
    batch_make(fx, call, &d);
}

/* Make a record for a forgotten watch key, which is deleted with its last watcher. The key has a
 * watcher, except in a full arena. */
static void forgotten_make(struct fixture *fx, struct call *call, unsigned op)
{
    struct draft watched = {.count = 0}, d = {.count = 0};
    struct reply reply;
    if (fx->shape == FULL) {
        watermark_make(fx, call, op);
        return;
    }
    watch_draft(fx, &watched, PG_C_ANY);
    watermark_draft(fx, &watched, PG_OP_FORGET);
    watermark_draft(fx, &d, op);
    watched.records[0].name = watched.records[1].name = d.records[0].name = 0;
    const uint8_t *key = watched.area + watched.records[0].key_len + watched.records[0].payload_len +
                         sizeof(struct pg_watch_key);
    watch_key_take(&watched, &watched.records[1], key);
    watch_key_take(&d, &d.records[0], key);
    batch_write(call, &fx->clients[0], &watched, PG_M_BATCH);
    call->real_ns = fx->real_ns;
    call_run(fx, call, &reply);
    CHECK(reply.bytes != 0);
    fx->clients[0].sequence++;
    batch_make(fx, call, &d);
}

static void cancel_make(struct fixture *fx, struct call *call, unsigned unused)
{
    struct draft d = {.count = 0};
    (void)unused;
    cancel_draft(fx, &d);
    batch_make(fx, call, &d);
}

static void complete_make(struct fixture *fx, struct call *call, unsigned unused)
{
    struct draft d = {.count = 0};
    (void)unused;
    complete_draft(fx, &d);
    batch_make(fx, call, &d);
}

static void bulk_make(struct fixture *fx, struct call *call, unsigned records)
{
    struct draft d = {.count = 0};
    for (uint32_t n = 2 + below(fx, records - 1); n > 0; n--)
        any_draft(fx, &d);
    batch_make(fx, call, &d);
}

static void get_make(struct fixture *fx, struct call *call, unsigned unused)
{
    struct draft d = {.count = 0};
    (void)unused;
    record_new(fx, &d, PG_OP_GET, false)->name = 0;
    batch_write(call, &fx->clients[0], &d, PG_M_QUERY);
}

static void repeated_make(struct fixture *fx, struct call *call, unsigned unused)
{
    struct reply reply;
    bulk_make(fx, call, 3);
    (void)unused;
    call->real_ns = fx->real_ns;
    call_run(fx, call, &reply);
}

/* Go back to the state that a kill before one of the newest batch's records would have left. If the
 * batch's reply uses extra memory, the batch stays finished. */
static void batch_cut_off(struct fixture *fx, struct client *c)
{
    struct pg_session *s = session_find(fx->a, c->session);
    struct pg_reply_memory *m = session_reply(fx->a, s, s->last);
    if (m->extra_blob != PG_NIL) {
        c->sequence++;
        return;
    }
    s->applied = below(fx, m->count);
    memset(&reply_results(fx->a, m)[s->applied], 0,
           (m->count - s->applied) * sizeof(struct pg_result));
    m->sequence = s->intent[0] = 0;
    s->current = s->last--;
}

/* Send a new batch with the sequence of an interrupted batch that the client has abandoned. */
static void changed_make(struct fixture *fx, struct call *call, unsigned records)
{
    struct client *c = &fx->clients[below(fx, CLIENTS)];
    struct draft before = {.count = 0}, d = {.count = 0};
    struct reply reply;
    while (before.count < records)
        any_draft(fx, &before);
    while (d.count < records)
        any_draft(fx, &d);
    batch_write(call, c, &before, PG_M_BATCH);
    call->real_ns = fx->real_ns;
    call_run(fx, call, &reply);
    CHECK(reply.bytes != 0);
    batch_cut_off(fx, c);
    batch_write(call, c, &d, PG_M_BATCH);
}

static void ack_make(struct fixture *fx, struct call *call, unsigned unused)
{
    const struct client *c = &fx->clients[below(fx, CLIENTS)];
    uint32_t count = 0;
    (void)unused;
    frame_write(call, c, PG_M_ACK, 0, 0);
    for (uint32_t slot = 0; slot < fx->a->slots.capacity; slot++) {
        const uint64_t ctl = fx->a->slots.hot[slot].ctl;
        if (ctl_state(ctl) == PG_S_FREE || !is_operation(fx->a, slot))
            continue;
        const bool outcome = ctl_state(ctl) == PG_S_OUTCOME;
        const struct pg_ack ack = {ctl_ticket(ctl), outcome ? 0 : operation_at(fx->a, slot)->version,
                                   slot, 0};
        call_append(call, &ack, sizeof ack);
        count++;
    }
    ((struct pg_frame *)call->message)->count = count;
}

/* Open a new session or a known session, or try to open a session while all session rows are in
 * use. */
static void hello_make(struct fixture *fx, struct call *call, unsigned unused)
{
    const struct pg_hello hello = {.nonce = {(uint8_t)(1 + below(fx, CLIENTS + 2))}};
    (void)unused;
    frame_write(call, &(struct client){0, 0, 100 + hello.nonce[0] - 1u}, PG_M_HELLO, 0, 0);
    call_append(call, &hello, sizeof hello);
    if (below(fx, 2))
        fx->real_ns += 2 * OWN_MINUTE_NS;
}

static void bye_make(struct fixture *fx, struct call *call, unsigned unused)
{
    (void)unused;
    frame_write(call, &fx->clients[below(fx, CLIENTS)], PG_M_BYE, 0, 0);
}

/* Advance past no deadline (far = 0), one deadline (1) or many deadlines (2), to the border of a
 * tick. The border is needed because within a tick a rebuild fires due timers at once, but a
 * running daemon waits for the tick's end. */
static void advance_make(struct fixture *fx, struct call *call, unsigned far)
{
    int64_t earliest_ns = INT64_MAX;
    for (uint32_t i = 0; i < fx->a->slots.capacity; i++)
        if (ctl_state(fx->a->slots.hot[i].ctl) == PG_S_ARMED &&
            timers_deadline_ns(fx->a, i) < earliest_ns)
            earliest_ns = timers_deadline_ns(fx->a, i);
    call->kind = BY_ADVANCE;
    fx->now_ns += below(fx, 3) * TICK_NS;
    if (earliest_ns < INT64_MAX / 8 && earliest_ns > fx->now_ns && far != 0)
        fx->now_ns = earliest_ns + TICK_NS;
    if (far > 1)
        fx->now_ns += (int64_t)(rng_next(&fx->rng) >> (24 + below(fx, 30)));
    fx->now_ns -= fx->now_ns % TICK_NS;
}

/* Fire an occurrence of a schedule, or take one back by its key. */
static void occurrence_make(struct fixture *fx, struct call *call, unsigned cancel)
{
    struct reply reply;
    schedule_write(fx, call, PG_SA_PUT);
    call->real_ns = fx->real_ns;
    call_run(fx, call, &reply);
    for (uint32_t slot = 0; slot < fx->a->slots.capacity && cancel; slot++) {
        const struct pg_cold *c = &fx->a->slots.cold[slot];
        struct draft d = {.count = 0};
        if (!ctl_live(fx->a->slots.hot[slot].ctl) ||
            !(fx->a->slots.hot[slot].flags & PG_F_SCHEDULE))
            continue;
        struct pg_record *r = record_new(fx, &d, PG_OP_CANCEL, false);
        d.used = 0;
        memcpy(draft_take(&d, c->key_len), blob_at(&fx->a->blobs, c->blob) + c->ext_len, c->key_len);
        r->key_len = c->key_len;
        r->key_type = PG_KEY_STR;
        r->name = 0;
        batch_make(fx, call, &d);
        return;
    }
    *call = (struct call){.bytes = 0};
    advance_make(fx, call, 1);
}

static void wall_make(struct fixture *fx, struct call *call, unsigned unused)
{
    (void)unused;
    call->kind = BY_ADVANCE;
    fx->offset_ns += (below(fx, 2) ? 1 : -1) * 2000000ll;
}

/* Make a call while the daemon drains. The arena does not store this state; the daemon sets it
 * again after a kill. */
static void drain_make(struct fixture *fx, struct call *call, unsigned expire)
{
    if (expire)
        advance_make(fx, call, 2);
    else
        bulk_make(fx, call, RECORDS_MAX);
    call->draining = true;
}

/* Change settings. The rate limit is too high to be reached, because a restart refills the limit's
 * token bucket. */
static void settings_make(struct fixture *fx, struct call *call, unsigned unused)
{
    const bool wal = pg_wal_buffer_of(fx->a) != NULL;
    struct pg_namespace_set s = {.fields = below(fx, PG_N_OPS) | (below(fx, 2) ? PG_N_OPS : 0) |
                                           (wal && below(fx, 3) == 0 ? PG_N_PARK : 0),
                                 .park_beyond_ns = below(fx, 2) * 20 * TICK_NS,
                                 .owner_uid = 100 + below(fx, 3),
                                 .durability = wal && below(fx, 2), .name_len = 1,
                                 .quota_timers = 1 + below(fx, 6),
                                 .quota_bytes = 16 * below(fx, 20),
                                 .quota_ops = 1000000 + below(fx, 2)};
    (void)unused;
    call->kind = BY_SETTINGS;
    call_append(call, &s, sizeof s);
    call_append(call, below(fx, 2) ? "n" : "m", 1);
}

static struct pg_topic_set topic_drawn(struct fixture *fx)
{
    const uint8_t policy = (uint8_t)below(fx, PG_LATE_POLICIES);
    return (struct pg_topic_set){.fields = PG_TF_LATE | (below(fx, 2) ? PG_TF_PAUSED : 0) |
                                           (below(fx, 4) == 0 ? PG_TF_SLACK : 0),
                                 .policy = policy,
                                 .grace_ns = policy == PG_LATE_FIRE ? 0 : PG_LATE_GRACE_MIN_NS,
                                 .paused = below(fx, 3) == 0,
                                 .slack_ns = below(fx, 3) * TICK_NS,
                                 .namespace_len = 1, .topic_len = 1};
}

static void topic_make(struct fixture *fx, struct call *call, unsigned unused)
{
    const struct pg_topic_set s = topic_drawn(fx);
    (void)unused;
    call->kind = BY_TOPIC;
    call->uid = fx->clients[0].uid;
    call_append(call, &s, sizeof s);
    call_append(call, below(fx, 2) ? "n" : "m", 1);
    call_append(call, "t", 1);
}

/* Arm a timer of the first name, which is due after a few ticks. */
static void soon_put(struct fixture *fx)
{
    struct call call = {.real_ns = fx->real_ns};
    struct reply reply;
    struct draft d = {.count = 0};
    struct client *c = &fx->clients[below(fx, CLIENTS)];
    fixture_commit(fx);
    put_draft(fx, &d, PG_MODE_REPLACE);
    d.records[0].name = 0;
    d.records[0].time_kind = PG_T_BOOT;
    d.records[0].time_ns = fx->now_ns + below(fx, 4) * TICK_NS;
    batch_write(&call, c, &d, PG_M_BATCH);
    call_run(fx, &call, &reply);
    c->sequence++;
}

/* Pause all topics until their timers are late, resume them with a late policy, and catch up. */
static void late_make(struct fixture *fx, struct call *call, unsigned policy)
{
    struct pg_topic_set s = {.fields = PG_TF_PAUSED, .paused = 1};
    struct call past = {.kind = BY_ADVANCE};
    struct reply reply;
    for (int n = 0; n < 2 * KEYS; n++)
        soon_put(fx);
    for (int resume = 0; resume < 2; resume++) {
        for (uint32_t i = 0; i < fx->a->topic_rows; i++)
            if (topic_at(fx->a, i)->name_len != 0)
                topic_configure(fx->a, i, &s);
        s = (struct pg_topic_set){.fields = PG_TF_LATE | PG_TF_PAUSED, .policy = (uint8_t)policy,
                                  .grace_ns = PG_LATE_GRACE_MIN_NS};
        if (resume)
            break;
        advance_make(fx, &past, 2);
        past.now_ns = fx->now_ns;
        past.offset_ns = fx->offset_ns;
        past.real_ns = fx->real_ns;
        call_run(fx, &past, &reply);
    }
    call->kind = BY_ADVANCE;
    fx->now_ns += 2 * PG_LATE_GRACE_MIN_NS;
}

static void sweep_make(struct fixture *fx, struct call *call, unsigned unused)
{
    (void)unused;
    call->kind = BY_SWEEP;
    fx->real_ns += 2 * OWN_MINUTE_NS;
}

static void published_make(struct fixture *fx, struct call *call, unsigned unused)
{
    struct reply reply;
    advance_make(fx, call, 2);
    (void)unused;
    call->now_ns = fx->now_ns;
    call->offset_ns = fx->offset_ns;
    call->real_ns = fx->real_ns;
    call_run(fx, call, &reply);
    call->kind = BY_PUBLISHED;
}

/* Publish to a topic that timers use, or to a topic that they never use. */
static void publish_make(struct fixture *fx, struct call *call, unsigned unused)
{
    const bool timers = below(fx, 2);
    const struct pg_publish head = {.payload_len = below(fx, 3) * 13, .key_len = 3,
                                    .key_type = PG_KEY_BYTES, .namespace_len = 1,
                                    .topic_len = timers ? 1 : 2};
    (void)unused;
    call->kind = BY_PUBLISH;
    call->bytes = 0;
    call->tail = fx->a->header->replay_tail;
    call_append(call, &head, sizeof head);
    call_append(call, timers ? "nt" : "n_e", 1u + head.topic_len);
    call_append(call, "key its payload of bytes, and so on", head.key_len + head.payload_len);
}

/* ---- the operations on consumer groups ------------------------------------------------------ */

static bool has_group(const struct fixture *fx, uint32_t group)
{
    return group_find(fx->a, 0, (struct name){&"abc"[group], 1}) != PG_NIL;
}

static void message_pass(struct fixture *fx, struct call *call)
{
    struct reply reply;
    call->real_ns = fx->real_ns;
    call_run(fx, call, &reply);
    fixture_commit(fx);
}

static void groups_begin(struct fixture *fx, uint32_t count)
{
    struct call call = {.kind = BY_MESSAGE};
    for (uint32_t group = 0; group < count; group++)
        if (!has_group(fx, group)) {
            group_message(fx, &call, PG_GA_CREATE, group);
            message_pass(fx, &call);
        }
}

static void jobs_past(struct fixture *fx)
{
    struct call call = {.kind = BY_SERVE, .session = fx->clients[below(fx, CLIENTS)].session};
    struct client *c = &fx->clients[below(fx, CLIENTS)];
    struct draft d = {.count = 0};
    if (fx->a->metrics->jobs == 0)
        return;
    if (below(fx, 2))
        message_pass(fx, &call);
    if (below(fx, 2))
        return;
    any_job_draft(fx, &d, c);
    batch_write(&call, c, &d, PG_M_BATCH);
    message_pass(fx, &call);
    c->sequence++;
}

/* Make sure that there are groups, and that most of the states of jobs occur. */
static void jobs_prepare(struct fixture *fx)
{
    struct call call;
    struct reply reply;
    groups_begin(fx, 2 + below(fx, 2));
    for (uint32_t n = 0; n < 3; n++) {
        past(fx, 1 + below(fx, 2));
        call = (struct call){.kind = BY_ADVANCE};
        advance_make(fx, &call, 2);
        call.now_ns = fx->now_ns;
        call.offset_ns = fx->offset_ns;
        call.real_ns = fx->real_ns;
        call_run(fx, &call, &reply);
        pg_published(fx->a, fx->a->header->replay_tail, 0, 0);
        fixture_commit(fx);
        jobs_past(fx);
    }
}

static void serve_make(struct fixture *fx, struct call *call, unsigned kind)
{
    jobs_prepare(fx);
    call->kind = (enum call_kind)kind;
    call->session = fx->clients[below(fx, CLIENTS)].session;
}

/* Let all jobs be leased. Return a client that holds some, if any does. */
static struct client *leases_begin(struct fixture *fx)
{
    struct client *c = &fx->clients[below(fx, CLIENTS)];
    struct call call = {.kind = BY_SERVE, .session = c->session};
    jobs_prepare(fx);
    message_pass(fx, &call);
    return c;
}

static void job_make(struct fixture *fx, struct call *call, unsigned op)
{
    struct client *c = leases_begin(fx);
    struct draft d = {.count = 0};
    job_draft(fx, &d, c, op);
    batch_write(call, c, &d, PG_M_BATCH);
}

static void jobs_make(struct fixture *fx, struct call *call, unsigned records)
{
    struct client *c = leases_begin(fx);
    struct draft d = {.count = 0};
    for (uint32_t n = 2 + below(fx, records - 1); n > 0; n--)
        if (below(fx, 3) == 0)
            any_draft(fx, &d);
        else
            any_job_draft(fx, &d, c);
    batch_write(call, c, &d, PG_M_BATCH);
}

static void cancel_delivered_make(struct fixture *fx, struct call *call, unsigned unused)
{
    struct draft d = {.count = 0};
    (void)unused;
    jobs_prepare(fx);
    cancel_delivered_draft(fx, &d);
    batch_make(fx, call, &d);
}

static void group_make(struct fixture *fx, struct call *call, unsigned action)
{
    if (action == PG_GA_CREATE)
        past(fx, 2);
    else
        jobs_prepare(fx);
    group_message(fx, call, action, action == PG_GA_CREATE ? below(fx, GROUPS) : below(fx, 2));
}

static void dead_make(struct fixture *fx, struct call *call, unsigned action)
{
    struct draft d = {.count = 0};
    struct client *c = leases_begin(fx);
    job_draft(fx, &d, c, PG_OP_JOB_REJECT);
    job_draft(fx, &d, c, PG_OP_JOB_REJECT);
    batch_write(call, c, &d, PG_M_BATCH);
    message_pass(fx, call);
    c->sequence++;
    dead_write(fx, call, action);
}

/* Advance to the end of a lease, of a delay or of a retention. */
static void job_due_make(struct fixture *fx, struct call *call, unsigned leases)
{
    int64_t earliest_ns = INT64_MAX;
    if (leases)
        leases_begin(fx);
    else
        jobs_prepare(fx);
    for (uint32_t row = 0; row < fx->a->job_slots.capacity; row++)
        if (ctl_state(job_hot(fx->a, row)->ctl) == PG_S_ARMED &&
            job_hot(fx->a, row)->deadline_ns < earliest_ns)
            earliest_ns = job_hot(fx->a, row)->deadline_ns;
    call->kind = BY_ADVANCE;
    if (earliest_ns != INT64_MAX && earliest_ns > fx->now_ns)
        fx->now_ns = earliest_ns;
    fx->now_ns += TICK_NS - fx->now_ns % TICK_NS;
}

static void with_jobs_make(struct fixture *fx, struct call *call, unsigned which)
{
    static void (*const makes[])(struct fixture *, struct call *, unsigned) = {
        bye_make, sweep_make, publish_make, plain_make, plain_make, bulk_make, advance_make};
    static const unsigned variants[] = {0, 0, 0, BY_MIGRATE, BY_COMPACTION, RECORDS_MAX, 2};
    if (which < 2 || below(fx, 2))
        leases_begin(fx);
    else
        jobs_prepare(fx);
    makes[which](fx, call, variants[which]);
}

static void plain_make(struct fixture *fx, struct call *call, unsigned kind)
{
    (void)fx;
    call->kind = (enum call_kind)kind;
}

static const struct operation {
    const char *name;
    void (*make)(struct fixture *fx, struct call *call, unsigned variant);
    unsigned variant;
} operations[] = {
    {"put error", put_make, PG_MODE_ERROR},
    {"put replace", put_make, PG_MODE_REPLACE},
    {"put keep", put_make, PG_MODE_KEEP},
    {"put extend", put_make, PG_MODE_EXTEND},
    {"cancel", cancel_make, 0},
    {"get", get_make, 0},
    {"settings", settings_make, 0},
    {"topic settings", topic_make, 0},
    {"skip", late_make, PG_LATE_SKIP},
    {"coalesce", late_make, PG_LATE_COALESCE},
    {"watch all", watch_make, PG_C_ALL},
    {"watch any", watch_make, PG_C_ANY},
    {"watch sum", watch_make, PG_C_SUM},
    {"watch client", watch_make, PG_C_CLIENT},
    {"watch quorum", watch_make, PG_C_QUORUM},
    {"advance key", watermark_make, PG_OP_ADVANCE_KEY},
    {"bump", watermark_make, PG_OP_BUMP},
    {"fail", watermark_make, PG_OP_FAIL},
    {"advance forgotten", forgotten_make, PG_OP_ADVANCE_KEY},
    {"fail forgotten", forgotten_make, PG_OP_FAIL},
    {"clear", watermark_make, PG_OP_CLEAR},
    {"forget", watermark_make, PG_OP_FORGET},
    {"cancel for key", watermark_make, PG_OP_CANCEL_FOR_KEY},
    {"complete", complete_make, 0},
    {"bulk", bulk_make, RECORDS_MAX},
    {"row error", rows_make, PG_MODE_ERROR},
    {"row replace", rows_make, PG_MODE_REPLACE},
    {"row keep", rows_make, PG_MODE_KEEP},
    {"row extend", rows_make, PG_MODE_EXTEND},
    {"bulk_load", bulk_load_make, 0},
    {"unpark", unpark_make, 0},
    {"row unpark", unpark_make, 1},
    {"schedule put", schedule_make, PG_SA_PUT},
    {"schedule delete", schedule_make, PG_SA_DELETE},
    {"schedule pause", schedule_make, PG_SA_PAUSE},
    {"schedule resume", schedule_make, PG_SA_RESUME},
    {"schedule trigger", schedule_make, PG_SA_TRIGGER},
    {"schedule backfill", schedule_make, PG_SA_BACKFILL},
    {"schedule recheck", recheck_make, 0},
    {"occurrence", occurrence_make, 0},
    {"cancel occurrence", occurrence_make, 1},
    {"bulk load status", bulk_load_ask_make, PG_LA_STATUS},
    {"bulk load open", bulk_load_ask_make, PG_LA_OPEN},
    {"bulk load close", bulk_load_ask_make, PG_LA_CLOSE},
    {"bulk load forget", bulk_load_ask_make, PG_LA_FORGET},
    {"sweep bulk loads", sweep_bulk_loads_make, 0},
    {"repeated batch", repeated_make, 0},
    {"ack", ack_make, 0},
    {"hello", hello_make, 0},
    {"bye", bye_make, 0},
    {"expire one", advance_make, 1},
    {"expire burst", advance_make, 2},
    {"cascade", advance_make, 0},
    {"wall step", wall_make, 0},
    {"published", published_make, 0},
    {"drain", drain_make, false},
    {"drain expire", drain_make, true},
    {"publish", publish_make, 0},
    {"sweep", sweep_make, 0},
    {"inbox", plain_make, BY_INBOX},
    {"inbox again", plain_make, BY_INBOX_AGAIN},
    {"migrate", plain_make, BY_MIGRATE},
    {"compaction", plain_make, BY_COMPACTION},
    {"changed batch", changed_make, 3},
    {"serve", serve_make, BY_SERVE},
    {"away", serve_make, BY_AWAY},
    {"job ack", job_make, PG_OP_JOB_ACK},
    {"job nack", job_make, PG_OP_JOB_NACK},
    {"job extend", job_make, PG_OP_JOB_EXTEND},
    {"job release", job_make, PG_OP_JOB_RELEASE},
    {"job reject", job_make, PG_OP_JOB_REJECT},
    {"jobs", jobs_make, 6},
    {"cancel delivered", cancel_delivered_make, 0},
    {"group create", group_make, PG_GA_CREATE},
    {"group change", group_make, PG_GA_CHANGE},
    {"group pause", group_make, PG_GA_PAUSE},
    {"group delete", group_make, PG_GA_DELETE},
    {"dead requeue", dead_make, PG_DA_REQUEUE},
    {"dead drop", dead_make, PG_DA_DROP},
    {"lease ends", job_due_make, 1},
    {"job due", job_due_make, 0},
    {"bye with jobs", with_jobs_make, 0},
    {"sweep with jobs", with_jobs_make, 1},
    {"publish with jobs", with_jobs_make, 2},
    {"migrate with jobs", with_jobs_make, 3},
    {"compaction with jobs", with_jobs_make, 4},
    {"bulk with jobs", with_jobs_make, 5},
    {"expire with jobs", with_jobs_make, 6},
    {NULL, NULL, 0},
};

const char *call_name(uint32_t operation) { return operations[operation].name; }

void call_make(struct fixture *fx, uint32_t operation, struct call *call)
{
    *call = (struct call){.kind = BY_MESSAGE};
    operations[operation].make(fx, call, operations[operation].variant);
    call->now_ns = fx->now_ns;
    call->offset_ns = fx->offset_ns;
    call->real_ns = fx->real_ns;
}

/* ---- history ------------------------------------------------------------------------------- */

static void hello(struct fixture *fx, uint32_t n)
{
    struct call call = {.real_ns = fx->real_ns};
    struct reply reply;
    struct pg_welcome welcome;
    const struct pg_hello body = {.nonce = {(uint8_t)(n + 1)}};
    fx->clients[n] = (struct client){0, 1, 100 + n};
    frame_write(&call, &fx->clients[n], PG_M_HELLO, 0, 0);
    call_append(&call, &body, sizeof body);
    call_run(fx, &call, &reply);
    CHECK_EQUAL(reply.bytes, sizeof(struct pg_frame) + sizeof welcome);
    memcpy(&welcome, reply.body + sizeof(struct pg_frame), sizeof welcome);
    fx->clients[n].session = welcome.session;
}

static void past_batch(struct fixture *fx)
{
    struct call call = {.real_ns = fx->real_ns};
    struct reply reply;
    struct draft d = {.count = 0};
    struct client *c = &fx->clients[below(fx, CLIENTS)];
    const uint32_t records = 1 + below(fx, 3);
    if (below(fx, 3) == 0)
        rows_draft(fx, &d, records, PG_MODES);
    while (d.count < records)
        any_draft(fx, &d);
    batch_write(&call, c, &d, PG_M_BATCH);
    call_run(fx, &call, &reply);
    CHECK(reply.bytes != 0);
    c->sequence++;
}

static void past_settings(struct fixture *fx)
{
    struct call call = {.bytes = 0};
    settings_make(fx, &call, 0);
    settings_run(fx, &call);
    call.bytes = 0;
    topic_make(fx, &call, 0);
    topic_run(fx, &call);
}

static void past_schedule(struct fixture *fx)
{
    struct call call = {.real_ns = fx->real_ns};
    struct reply reply;
    schedule_write(fx, &call, below(fx, 3) == 0 ? PG_SA_PAUSE : PG_SA_PUT);
    call_run(fx, &call, &reply);
}

/* Run calls of all kinds, so that the arena holds timers, operations and notices of different
 * ages. */
static void past(struct fixture *fx, uint32_t steps)
{
    struct call call = {.kind = BY_ADVANCE};
    struct reply reply;
    while (steps-- > 0) {
        fixture_commit(fx);
        if (below(fx, 16) == 0)
            past_settings(fx);
        if (below(fx, 6) == 0)
            past_schedule(fx);
        past_batch(fx);
        jobs_past(fx);
        fx->now_ns += below(fx, 3) * TICK_NS;
        fx->real_ns += 1000000;
        call.now_ns = fx->now_ns;
        call.offset_ns = fx->offset_ns;
        call.real_ns = fx->real_ns;
        call.kind = below(fx, 3) == 0 ? BY_PUBLISHED : BY_ADVANCE;
        call_run(fx, &call, &reply);
    }
}

static uint64_t replay_buffer_retained(const struct fixture *fx)
{
    return fx->a->header->replay_tail - fx->a->header->replay_head;
}

/* Fill the slots and the replay buffer, so that every later notice drops an old notice. */
static void fill(struct fixture *fx)
{
    struct call call;
    struct reply reply;
    for (uint32_t tries = 0; tries < 60 && replay_buffer_retained(fx) < fx->config.replay_capacity;
         tries++) {
        past(fx, 1);
        call = (struct call){.kind = BY_ADVANCE};
        advance_make(fx, &call, 1);
        call.now_ns = fx->now_ns;
        call.real_ns = fx->real_ns;
        call_run(fx, &call, &reply);
        pg_published(fx->a, fx->a->header->replay_tail, 0, 0);
    }
    for (uint32_t tries = 0; tries < 60 && slots_live(&fx->a->slots) < fx->config.capacity; tries++)
        past(fx, 1);
}

static struct pg_config config_of(struct fixture *fx)
{
    return (struct pg_config){
        .layout_id = LAYOUT, .payload_bytes = 20480 + 4096ull * below(fx, 6),
        .replay_bytes_max = 16384, .tick_ns = TICK_NS,
        .now_ns = TICK_NS * (1 + (int64_t)below(fx, 1 << 10)),
        .stream_id = 1, .secret = {rng_next(&fx->rng), rng_next(&fx->rng)},
        .capacity = 6 + below(fx, 9), .replay_capacity = 16u << below(fx, 2),
        .fanout = 2u << below(fx, 3), .namespaces = 2, .topics = 2 + below(fx, 3),
        .sessions = SESSIONS, .accounts = 2 + below(fx, 3), .bulk_loads = 1 + below(fx, BULK_LOADS),
        .bulk_load_blocks = 1 + below(fx, BULK_LOAD_BLOCKS), .watches = 8 + below(fx, 12),
        .watermarks = 4 + below(fx, 4), .watermark_ttl_ns = 60000000000, .inbox_max = 2 + below(fx,
                                                                                               6),
        .schedules = 1 + below(fx, SCHEDULE_ROWS),
        .clock_kind = PG_CLOCK_VIRTUAL, .wal_buffer_bytes = below(fx, 2) ? PG_WAL_BUFFER_MIN : 0,
        .groups = GROUPS, .jobs = GROUPS * JOBS_EACH, .shard = 1, .shards = 2};
}

void fixture_open(struct fixture *fx, enum shape shape, uint64_t seed)
{
    *fx = (struct fixture){.rng = {seed * 0x9e3779b97f4a7c15u + 1}, .shape = shape};
    fx->config = config_of(fx);
    fx->lengths = below(fx, 40);
    memory_take(fx);
    fx->now_ns = fx->config.now_ns;
    fx->real_ns = 1000000000;
    CHECK(pg_create(fx->a, fx->arena, fx->secret, &fx->config));
    wal_buffer_place(fx);
    if (below(fx, 3) == 0)
        pg_set_quotas(fx->a, 6, 700, 0);   /* no rate limit, because a restart refills its token
                                              bucket */
    if (below(fx, 3) == 0)
        pg_set_uid_share(fx->a, 30 + below(fx, 60), 0);
    if (pg_wal_buffer_of(fx->a) != NULL && below(fx, 2))
        parks_far(fx);
    for (uint32_t n = 0; n < CLIENTS; n++)
        hello(fx, n);
    if (below(fx, 2))
        groups_begin(fx, 1 + below(fx, GROUPS));
    if (shape != EMPTY)
        past(fx, 2 + below(fx, 8));
    if (shape == FULL)
        fill(fx);
}
