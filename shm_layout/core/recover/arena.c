/* arena.c - the sizes of an arena's regions; create, attach and check an arena. */

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/tickets.h"
#include "core/base/wheel.h"
#include "core/arena.h"
#include "core/wal/wal_buffer.h"
#include "core/state/bulk_loads.h"
#include "core/state/groups.h"
#include "core/state/cursors.h"
#include "core/state/inbox.h"
#include "core/state/jobs.h"
#include "core/state/members.h"
#include "core/state/names.h"
#include "core/state/operations.h"
#include "core/state/quotas.h"
#include "core/state/replay_buffer.h"
#include "core/state/schedules.h"
#include "core/state/session.h"
#include "core/state/sweeps.h"
#include "core/state/timers.h"
#include "core/state/watches.h"
#include "core/state/watermarks.h"
#include "core/recover/rebuild.h"

/* ---- geometry ------------------------------------------------------------------------ */

struct plan {
    struct pg_region regions[sizeof((struct pg_header *)0)->regions / sizeof(struct pg_region)];
    uint64_t length;
};

static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

static struct wheel_shape shape_of(const struct pg_config *c)
{
    return (struct wheel_shape){c->tick_ns, c->fanout, c->capacity + 1 + c->jobs, c->topics};
}

static uint32_t payload_granules(const struct pg_config *c)
{
    return (uint32_t)(round_up(c->payload_bytes, PG_REGION_ALIGN) / PG_GRANULE);
}

static uint64_t ids_of(const struct pg_config *c)
{
    return (uint64_t)c->capacity + 1 + c->replay_capacity;
}

static uint32_t name_cells(const struct pg_config *c)
{
    uint32_t cells = 16;
    while (cells < 2 * (c->namespaces + c->topics))
        cells *= 2;
    return cells;
}

static bool config_bounded(const struct pg_config *c, struct pg_fault *why)
{
    const struct {
        const char *detail;
        uint64_t value, low, high;
    } bounds[] = {
        {"capacity", c->capacity, 1, PG_CAPACITY_MAX},
        {"replay buffer entries", c->replay_capacity, 16, PG_CAPACITY_MAX},
        {"payload bytes", c->payload_bytes, 1, (uint64_t)PG_GRANULE * (PG_NIL - 512)},
        {"tick in ns", (uint64_t)c->tick_ns, 1000, 100000000},
        {"fan-out", c->fanout, 2, 256},
        {"namespaces", c->namespaces, 1, 4096},
        {"topics", c->topics, 1, 65535},
        {"sessions", c->sessions, 1, 65535},
        {"watch records", c->watches, 1, PG_CAPACITY_MAX},
        {"watch keys", c->watermarks, 1, PG_CAPACITY_MAX},
        {"accounts", c->accounts, 0, 65535},
        {"consumer groups", c->groups, 0, PG_GROUPS_MAX},
        {"jobs of consumer groups", c->jobs, 0, PG_CAPACITY_MAX},
        {"bulk loads", c->bulk_loads, 0, 65535},
        {"blocks of rows of bulk loads", c->bulk_load_blocks, 0, PG_CAPACITY_MAX},
        {"schedules", c->schedules, 0, 65535},
        {"rows of cursors", c->cursors, 0, 65535},
        {"outcomes in an inbox", c->inbox_max, 1, UINT64_MAX},
        {"stream id", c->stream_id, 1, UINT64_MAX},
        {"bits of the replay buffer entries", (uint64_t)__builtin_popcount(c->replay_capacity), 1,
         1},
        {"WAL buffer bytes", c->wal_buffer_bytes, c->wal_buffer_bytes == 0 ? 0 : PG_WAL_BUFFER_MIN,
         PG_WAL_BUFFER_MAX},
        {"bits of the WAL buffer bytes", (uint64_t)__builtin_popcountll(c->wal_buffer_bytes), 0, 1},
        {"shards", c->shards, 0, PG_SHARDS_MAX},
        {"shard", c->shard, 0, c->shards == 0 ? 0 : c->shards - 1},
    };
    for (uint32_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++)
        if (bounds[i].value < bounds[i].low || bounds[i].value > bounds[i].high)
            return fault_set(why, "header", bounds[i].detail, 0,
                             bounds[i].value < bounds[i].low ? bounds[i].low : bounds[i].high,
                             bounds[i].value);
    return true;
}

static bool config_valid(const struct pg_config *c)
{
    struct pg_fault why = {0};
    return config_bounded(c, &why);
}

static void plan_add(struct plan *p, enum pg_region_id id, uint64_t stride, uint64_t count)
{
    p->length = round_up(p->length, PG_REGION_ALIGN);
    p->regions[id] = (struct pg_region){p->length, stride * count, (uint32_t)stride,
                                        (uint32_t)count};
    p->length += stride * count;
}

/* Number of topics of all consumer groups together, per group. */
#define TOPICS_PER_GROUP 8

/* Number of members of all consumer groups together. */
static uint64_t members_of(uint32_t groups) { return 1024 + 16ull * groups; }

static void groups_plan(struct plan *p, const struct pg_config *c)
{
    plan_add(p, PG_R_GROUPS, sizeof(struct pg_consumer_group), c->groups);
    plan_add(p, PG_R_GROUP_TOPICS, sizeof(struct pg_group_topic),
             (uint64_t)c->groups * TOPICS_PER_GROUP);
    plan_add(p, PG_R_MEMBERS, sizeof(struct pg_member), members_of(c->groups));
    plan_add(p, PG_R_JOBS, sizeof(struct pg_job), c->jobs);
    plan_add(p, PG_R_FREE_JOBS, sizeof(uint32_t), (uint64_t)c->jobs + 1);
    plan_add(p, PG_R_JOB_INDEX, sizeof(struct pg_index_bucket), index_buckets(c->jobs));
    plan_add(p, PG_R_ORDER_INDEX, sizeof(struct pg_index_bucket), index_buckets(c->jobs));
    plan_add(p, PG_R_GROUP_CHANGE, sizeof(struct pg_group_change), 1);
}

static void plan_make(struct plan *p, const struct pg_config *c)
{
    const struct wheel_shape shape = shape_of(c);
    const uint32_t slots = c->capacity + 1, granules = payload_granules(c);

    memset(p, 0, sizeof *p);
    p->length = sizeof(struct pg_header);
    plan_add(p, PG_R_METRICS, sizeof(struct pg_metrics), 1);
    plan_add(p, PG_R_HISTOGRAMS, sizeof(struct pg_histogram), PG_HISTOGRAMS);
    plan_add(p, PG_R_HOT, sizeof(struct pg_hot), (uint64_t)slots + c->jobs);
    plan_add(p, PG_R_COLD, sizeof(struct pg_cold), slots);
    plan_add(p, PG_R_FREE_SLOTS, sizeof(uint32_t), (uint64_t)slots + 1);
    plan_add(p, PG_R_WHEEL, sizeof(struct pg_wheel), 1);
    plan_add(p, PG_R_BUCKETS, sizeof(struct pg_bucket), wheel_buckets(&shape));
    plan_add(p, PG_R_CHUNKS, sizeof(struct pg_chunk), wheel_chunks(&shape));
    plan_add(p, PG_R_BACKLOGS, sizeof(struct pg_backlog), c->topics);
    plan_add(p, PG_R_FREE_CHUNKS, sizeof(uint32_t), (uint64_t)wheel_chunks(&shape) + 1);
    plan_add(p, PG_R_INDEX, sizeof(struct pg_index_bucket), index_buckets(ids_of(c)));
    plan_add(p, PG_R_BLOB_HEAP, sizeof(struct pg_blob_heap), 1);
    plan_add(p, PG_R_BLOB_MAP, sizeof(uint64_t), blob_map_words(granules));
    plan_add(p, PG_R_BLOBS, PG_GRANULE, granules);
    plan_add(p, PG_R_NAMESPACES, sizeof(struct pg_namespace), c->namespaces);
    plan_add(p, PG_R_TOPICS, sizeof(struct pg_topic), c->topics);
    plan_add(p, PG_R_NAME_INDEX, sizeof(uint32_t), name_cells(c));
    plan_add(p, PG_R_PURGATORY, sizeof(struct pg_purgatory), 1);
    plan_add(p, PG_R_WATCHES, sizeof(struct pg_watch), c->watches);
    plan_add(p, PG_R_WATERMARKS, sizeof(struct pg_watermark), c->watermarks);
    plan_add(p, PG_R_WATERMARK_INDEX, sizeof(struct pg_index_bucket), index_buckets(c->watermarks));
    plan_add(p, PG_R_REPLAY_BUFFER, sizeof(struct pg_entry), c->replay_capacity);
    plan_add(p, PG_R_SWEEPS, sizeof(struct pg_sweep), PG_SWEEPS);
    if (c->accounts != 0)
        plan_add(p, PG_R_ACCOUNTS, sizeof(struct pg_account), c->accounts);
    if (c->bulk_loads != 0)
        plan_add(p, PG_R_BULK_LOADS, sizeof(struct pg_bulk_load), c->bulk_loads);
    if (c->bulk_load_blocks != 0) {
        plan_add(p, PG_R_BULK_LOAD_BLOCKS, sizeof(struct pg_bulk_load_block), c->bulk_load_blocks);
        plan_add(p, PG_R_BULK_LOAD_BITS, PG_BULK_LOAD_BLOCK_ROWS / 8, c->bulk_load_blocks);
        plan_add(p, PG_R_BULK_LOAD_INDEX, sizeof(struct pg_index_bucket),
                 index_buckets(c->bulk_load_blocks));
    }
    if (c->groups != 0)
        groups_plan(p, c);
    if (c->schedules != 0)
        plan_add(p, PG_R_SCHEDULES, sizeof(struct pg_schedule), c->schedules);
    if (c->cursors != 0)
        plan_add(p, PG_R_CURSORS, sizeof(struct pg_cursor), c->cursors);
    if (c->wal_buffer_bytes != 0) {
        plan_add(p, PG_R_TIMESTAMPS, sizeof(struct pg_timestamps), slots);
        plan_add(p, PG_R_WAL_BUFFER, PG_WAL_BUFFER_HEAD,
                 1 + c->wal_buffer_bytes / PG_WAL_BUFFER_HEAD);
    }
    p->length = round_up(p->length, PG_REGION_ALIGN);
}

uint64_t pg_handle_bytes(void) { return sizeof(struct pg_arena); }

uint64_t pg_arena_bytes(const struct pg_config *config)
{
    struct plan plan;
    if (!config_valid(config))
        return 0;
    plan_make(&plan, config);
    return plan.length;
}

/* Smallest answer pool, in results: space for the full windows of 16 sessions. */
#define RESERVED_ANSWERS 65536u
/* Number of results per session in a larger answer pool. */
#define ANSWERS_PER_SESSION 256u

/* Number of results in the answer pool of an arena with this many sessions. */
static uint32_t answers_of(uint32_t sessions)
{
    const uint64_t whole = (uint64_t)sessions * PG_WINDOW * PG_BATCH_RECORDS;
    const uint64_t share = (uint64_t)sessions * ANSWERS_PER_SESSION;
    const uint64_t answers = share < RESERVED_ANSWERS ? RESERVED_ANSWERS : share;
    return (uint32_t)(whole < answers ? whole : answers);
}

struct private_plan {
    uint64_t rows, replies, heap, map, answers, length;
};

static struct private_plan private_plan(uint32_t sessions, uint32_t session_bytes,
                                        uint32_t reply_bytes)
{
    struct private_plan p = {.rows = round_up(sizeof(struct pg_private), 256)};
    const uint32_t answers = answers_of(sessions);
    p.replies = round_up(p.rows + (uint64_t)sessions * session_bytes, PG_REGION_ALIGN);
    p.heap = round_up(p.replies + (uint64_t)sessions * PG_WINDOW * reply_bytes, PG_REGION_ALIGN);
    p.map = round_up(p.heap + sizeof(struct pg_blob_heap), PG_REGION_ALIGN);
    p.answers = round_up(p.map + blob_map_words(answers) * sizeof(uint64_t), PG_REGION_ALIGN);
    p.length = round_up(p.answers + (uint64_t)answers * sizeof(struct pg_result),
                        PG_REGION_ALIGN);
    return p;
}

uint64_t pg_private_bytes(const struct pg_config *config)
{
    return config_valid(config) ? private_plan(config->sessions, sizeof(struct pg_session),
                                               sizeof(struct pg_reply_memory)).length : 0;
}

/* ---- the handle ---------------------------------------------------------------------- */

static void *region(const struct pg_arena *a, enum pg_region_id id)
{
    return (uint8_t *)a->header + a->header->regions[id].offset;
}

static uint32_t region_count(const struct pg_arena *a, enum pg_region_id id)
{
    return a->header->regions[id].count;
}

static void handle_open_authoritative(struct pg_arena *a)
{
    a->metrics = region(a, PG_R_METRICS);
    a->histograms = region(a, PG_R_HISTOGRAMS);
    a->namespaces = region(a, PG_R_NAMESPACES);
    a->namespace_rows = region_count(a, PG_R_NAMESPACES);
    a->topics = region(a, PG_R_TOPICS);
    a->topic_rows = region_count(a, PG_R_TOPICS);
    a->accounts = region(a, PG_R_ACCOUNTS);
    a->account_rows = region_count(a, PG_R_ACCOUNTS);
    a->bulk_loads = region(a, PG_R_BULK_LOADS);
    a->bulk_load_rows = region_count(a, PG_R_BULK_LOADS);
    a->bulk_load_blocks = region(a, PG_R_BULK_LOAD_BLOCKS);
    a->bulk_load_block_rows = region_count(a, PG_R_BULK_LOAD_BLOCKS);
    a->bulk_load_bits = region(a, PG_R_BULK_LOAD_BITS);
    a->sweeps = region(a, PG_R_SWEEPS);
    a->schedules = region(a, PG_R_SCHEDULES);
    a->schedule_rows = region_count(a, PG_R_SCHEDULES);
    a->cursors = region(a, PG_R_CURSORS);
    a->cursor_rows = region_count(a, PG_R_CURSORS);
    a->replay_buffer = region(a, PG_R_REPLAY_BUFFER);
    a->purgatory = region(a, PG_R_PURGATORY);
    a->watches = region(a, PG_R_WATCHES);
    a->watch_rows = region_count(a, PG_R_WATCHES);
    a->watermarks = region(a, PG_R_WATERMARKS);
    a->watermark_rows = region_count(a, PG_R_WATERMARKS);
    if (region_count(a, PG_R_WAL_BUFFER) != 0) {
        a->wal_buffer = region(a, PG_R_WAL_BUFFER);
        a->ring = (uint8_t *)region(a, PG_R_WAL_BUFFER) + PG_WAL_BUFFER_HEAD;
        a->timestamps = region(a, PG_R_TIMESTAMPS);
    }
    a->slots = (struct slots){region(a, PG_R_HOT), region(a, PG_R_COLD),
                              region(a, PG_R_FREE_SLOTS), a->header->capacity + 1};
}

static void groups_open(struct pg_arena *a)
{
    const uint32_t jobs = region_count(a, PG_R_JOBS);
    a->groups = region(a, PG_R_GROUPS);
    a->group_rows = region_count(a, PG_R_GROUPS);
    a->group_topics = region(a, PG_R_GROUP_TOPICS);
    a->group_topic_rows = region_count(a, PG_R_GROUP_TOPICS);
    a->members = region(a, PG_R_MEMBERS);
    a->member_rows = region_count(a, PG_R_MEMBERS);
    a->jobs = region(a, PG_R_JOBS);
    a->group_change = region(a, PG_R_GROUP_CHANGE);
    a->job_slots = (struct slots){(struct pg_hot *)region(a, PG_R_HOT) + a->slots.capacity, NULL,
                                  region(a, PG_R_FREE_JOBS), jobs};
    a->job_index = (struct key_index){region(a, PG_R_JOB_INDEX),
                                      region_count(a, PG_R_JOB_INDEX), index_id_bits(jobs)};
    a->order_index = (struct key_index){region(a, PG_R_ORDER_INDEX),
                                        region_count(a, PG_R_ORDER_INDEX), index_id_bits(jobs)};
}

static void handle_open_derived(struct pg_arena *a)
{
    a->name_index = region(a, PG_R_NAME_INDEX);
    a->name_cells = region_count(a, PG_R_NAME_INDEX);
    a->wheel = (struct wheel){region(a, PG_R_WHEEL), region(a, PG_R_BUCKETS),
                              region(a, PG_R_CHUNKS), region(a, PG_R_FREE_CHUNKS),
                              region(a, PG_R_HOT),
                              a->slots.capacity + region_count(a, PG_R_JOBS), a->topic_rows,
                              region(a, PG_R_BACKLOGS)};
    a->index = (struct key_index){region(a, PG_R_INDEX), region_count(a, PG_R_INDEX),
                                  index_id_bits((uint64_t)a->slots.capacity +
                                                a->header->replay_capacity)};
    a->watermark_index = (struct key_index){region(a, PG_R_WATERMARK_INDEX),
                                            region_count(a, PG_R_WATERMARK_INDEX),
                                            index_id_bits(a->watermark_rows)};
    a->bulk_load_index = (struct key_index){region(a, PG_R_BULK_LOAD_INDEX),
                                            region_count(a, PG_R_BULK_LOAD_INDEX),
                                            index_id_bits(a->bulk_load_block_rows)};
    a->blobs = (struct blob_pool){region(a, PG_R_BLOB_HEAP), region(a, PG_R_BLOB_MAP),
                                  region(a, PG_R_BLOBS), region_count(a, PG_R_BLOBS), 0, 0};
}

static void handle_point(struct pg_arena *a, void *arena, void *secret)
{
    a->header = arena;
    handle_open_authoritative(a);
    groups_open(a);
    handle_open_derived(a);
    if (secret == NULL)
        return;
    a->secret = secret;
    a->sessions = (struct pg_session *)((uint8_t *)secret + a->secret->rows_offset);
    a->replies = (struct pg_reply_memory *)((uint8_t *)secret + a->secret->replies_offset);
    a->answers = (struct blob_pool){
        (struct pg_blob_heap *)((uint8_t *)secret + a->secret->heap_offset),
        (uint64_t *)((uint8_t *)secret + a->secret->map_offset),
        (uint8_t *)secret + a->secret->answers_offset, a->secret->answers, 0, 0};
    a->state.session_rows = a->secret->sessions;
}

static void handle_open(struct pg_arena *a, void *arena, void *secret)
{
    memset(a, 0, sizeof *a);
    handle_point(a, arena, secret);
    a->call.uid = PG_NIL;
    a->state.wall_cursor = a->state.orphans = PG_NIL;
    a->state.catch_up_ns = INT64_MAX;
    a->state.outage_end_ns = INT64_MIN;
    a->state.free_member = a->state.draft.group = PG_NIL;
    a->state.jobs_again_ns = INT64_MAX;
    a->state.free_bulk_load_block = a->state.bulk_load_block = a->call.bulk_load = PG_NIL;
    a->state.schedules_due = a->state.schedules_asked = a->state.stale_occurrence = PG_NIL;
    a->state.wall_placed_by_ns = a->header->wall_offset_ns;
    a->state.topics_stuck_at = a->state.topics_refused_at = UINT64_MAX;
    a->call.watch_key_share = a->call.watch_share = UINT32_MAX;
    a->call.operation_share = a->call.block_share = UINT32_MAX;
    time_set(a, 0, a->header->heartbeat_boot_ns);
}

void pg_move(struct pg_arena *a, void *arena, void *secret)
{
    a->call.worked = NULL;                 /* the only pointer that is kept between calls */
    handle_point(a, arena, secret);
}

/* ---- create -------------------------------------------------------------------------- */

static void header_fill(struct pg_header *h, const struct pg_config *c, const struct plan *p)
{
    h->magic = PG_MAGIC;
    h->abi_major = PG_ABI_MAJOR;
    h->abi_minor = PG_ABI_MINOR;
    h->layout_id = c->layout_id;
    h->length = p->length;
    h->page_size = c->page_size;
    h->clock_kind = c->clock_kind;
    memcpy(h->uuid, c->uuid, sizeof h->uuid);
    memcpy(h->boot_id, c->boot_id, sizeof h->boot_id);
    h->stream_id = c->stream_id;
    h->shard = c->shard;
    h->shards = c->shards;
    h->capacity = c->capacity;
    h->replay_capacity = c->replay_capacity;
    h->payload_bytes = (uint64_t)payload_granules(c) * PG_GRANULE;
    h->replay_bytes_max = c->replay_bytes_max;
    h->tick_ns = (uint64_t)c->tick_ns;
    h->fanout = c->fanout;
    const struct wheel_shape shape = shape_of(c);
    h->levels = wheel_levels(&shape);
    h->created_wall_ns = c->created_wall_ns;
    h->wall_origin_ns = c->wall_origin_ns;
    h->now_ns = c->now_ns;
    h->wall_offset_ns = c->wall_offset_ns;
    h->next_deadline_ns = INT64_MAX;
    h->next_ticket = c->shard * PG_TICKET_SHARD + 1;
    h->next_incarnation = 1;
    memcpy(h->regions, p->regions, sizeof h->regions);
}

static void private_fill(struct pg_private *s, const struct pg_config *c)
{
    const struct private_plan p = private_plan(c->sessions, sizeof(struct pg_session),
                                               sizeof(struct pg_reply_memory));
    s->magic = PG_PRIVATE_MAGIC;
    s->layout_id = c->layout_id;
    s->length = p.length;
    memcpy(s->uuid, c->uuid, sizeof s->uuid);
    memcpy(s->secret, c->secret, sizeof s->secret);
    s->sessions = c->sessions;
    s->window = PG_WINDOW;
    s->session_bytes = sizeof(struct pg_session);
    s->reply_bytes = sizeof(struct pg_reply_memory);
    s->rows_offset = p.rows;
    s->replies_offset = p.replies;
    s->heap_offset = p.heap;
    s->map_offset = p.map;
    s->answers_offset = p.answers;
    s->answers = answers_of(c->sessions);
    s->next_session = 1;
}

int pg_create(struct pg_arena *a, void *arena, void *secret, const struct pg_config *config)
{
    const struct wheel_shape shape = shape_of(config);
    struct pg_header *h = arena;
    struct pg_private *s = secret;
    struct plan plan;

    if (!config_valid(config))
        return 0;
    plan_make(&plan, config);
    header_fill(h, config, &plan);
    private_fill(s, config);
    handle_open(a, arena, secret);
    time_set(a, config->now_ns, a->call.real_boot_ns);
    slots_init(&a->slots);
    wheel_init(&a->wheel, &shape, config->now_ns);
    index_init(&a->index);
    blobs_init(&a->blobs);
    sessions_init(a);
    names_rebuild(a);
    watermarks_init(a, config->watermark_ttl_ns);
    inboxes_init(a, config->inbox_max);
    watches_init(a);
    bulk_loads_init(a);
    if (config->groups != 0) {
        groups_init(a);
        members_init(a);
        jobs_init(a);
    }
    schedules_init(a);
    wal_buffer_init(a);
    STORE_RELEASE(&h->daemon_state, PG_D_RECOVERING);
    STORE_RELEASE(&h->state, PG_REBUILDING);
    STORE_RELEASE(&s->version, PG_PRIVATE_MAGIC);
    STORE_RELEASE(&h->version, PG_MAGIC);
    return 1;
}

/* ---- attach -------------------------------------------------------------------------- */

static bool same(struct pg_fault *why, const char *detail, uint64_t expected, uint64_t found)
{
    return expected == found || fault_set(why, "header", detail, 0, expected, found);
}

static uint64_t wal_buffer_bytes_of(const struct pg_header *h)
{
    const uint64_t length = h->regions[PG_R_WAL_BUFFER].length;
    return length < PG_WAL_BUFFER_HEAD ? 0 : length - PG_WAL_BUFFER_HEAD;
}

static struct pg_config config_of(const struct pg_header *h)
{
    return (struct pg_config){.capacity = h->capacity, .replay_capacity = h->replay_capacity,
                              .payload_bytes = h->payload_bytes, .tick_ns = (int64_t)h->tick_ns,
                              .fanout = h->fanout, .stream_id = h->stream_id,
                              .namespaces = h->regions[PG_R_NAMESPACES].count,
                              .topics = h->regions[PG_R_TOPICS].count, .sessions = 1,
                              .watches = h->regions[PG_R_WATCHES].count,
                              .watermarks = h->regions[PG_R_WATERMARKS].count,
                              .accounts = h->regions[PG_R_ACCOUNTS].count,
                              .bulk_loads = h->regions[PG_R_BULK_LOADS].count,
                              .bulk_load_blocks = h->regions[PG_R_BULK_LOAD_BLOCKS].count,
                              .inbox_max = 1, .groups = h->regions[PG_R_GROUPS].count,
                              .jobs = h->regions[PG_R_JOBS].count,
                              .schedules = h->regions[PG_R_SCHEDULES].count,
                              .cursors = h->regions[PG_R_CURSORS].count,
                              .wal_buffer_bytes = wal_buffer_bytes_of(h), .shard = h->shard,
                              .shards = h->shards};
}

static bool region_fits(const struct pg_region *planned, const struct pg_region *r, uint32_t id,
                        struct pg_fault *why)
{
    return (planned->offset == r->offset ||
            fault_set(why, "header", "offset of a region", id, planned->offset, r->offset)) &&
           (planned->length == r->length ||
            fault_set(why, "header", "length of a region", id, planned->length, r->length)) &&
           (planned->stride == r->stride ||
            fault_set(why, "header", "stride of a region", id, planned->stride, r->stride)) &&
           (planned->count == r->count ||
            fault_set(why, "header", "elements of a region", id, planned->count, r->count));
}

/* Check that each region is where the sizes in the header place it. Later accesses then stay inside
 * the mapping. */
static bool regions_fit(const struct pg_header *h, struct pg_fault *why)
{
    const struct pg_config config = config_of(h);
    const struct wheel_shape shape = shape_of(&config);
    struct plan plan;
    if (!config_bounded(&config, why))
        return false;
    plan_make(&plan, &config);
    for (uint32_t i = 0; i < sizeof plan.regions / sizeof plan.regions[0]; i++)
        if (!region_fits(&plan.regions[i], &h->regions[i], i, why))
            return false;
    return same(why, "length of all regions", plan.length, h->length) &&
           same(why, "levels of the wheel", wheel_levels(&shape), h->levels) &&
           same(why, "payload bytes", h->regions[PG_R_BLOBS].length, h->payload_bytes);
}

/* Check that the fields that are read from an arena of an earlier ABI lie inside its regions. */
static bool heads_inside(const struct pg_header *h, struct pg_fault *why)
{
    const struct pg_region *wal = &h->regions[PG_R_WAL_BUFFER];
    const uint64_t heads = offsetof(struct pg_purgatory, inbox_max) + sizeof(uint64_t);
    return (h->regions[PG_R_PURGATORY].length >= heads ||
            same(why, "bytes of the purgatory's heads", heads, h->regions[PG_R_PURGATORY].length)) &&
           (wal->count == 0 ||
            same(why, "stride of the WAL buffer", PG_WAL_BUFFER_HEAD, wal->stride));
}

/* Check the regions of an arena of an earlier ABI: each region must lie inside the arena file. */
static bool regions_inside(const struct pg_header *h, struct pg_fault *why)
{
    for (uint32_t i = 0; i < sizeof h->regions / sizeof h->regions[0]; i++) {
        const struct pg_region *r = &h->regions[i];
        if (r->offset > h->length || r->length > h->length - r->offset ||
            r->offset % PG_GRANULE != 0 || (uint64_t)r->stride * r->count != r->length ||
            (r->length == 0) != (r->count == 0))
            return fault_set(why, "header", "a region lies outside the arena file", i, h->length,
                             r->offset);
    }
    return heads_inside(h, why);
}

static bool header_known(const struct pg_header *h, uint64_t bytes, uint64_t layout_id,
                         struct pg_fault *why)
{
    if (bytes < sizeof *h)
        return same(why, "arena file too small for a header", sizeof *h, bytes);
    return same(why, "magic: not an arena of purgatoryd", PG_MAGIC, h->magic) &&
           same(why, "version mark: the arena was never completed", PG_MAGIC,
                LOAD_ACQUIRE(&h->version)) &&
           same(why, "ABI major", PG_ABI_MAJOR, h->abi_major) &&
           same(why, "layout id", layout_id, h->layout_id) &&
           same(why, "length of the arena file", h->length, bytes);
}

static bool header_fits(const struct pg_header *h, uint64_t bytes, uint64_t layout_id,
                        struct pg_fault *why)
{
    return header_known(h, bytes, layout_id, why) && regions_fit(h, why);
}

static bool uuid_fits(const uint8_t ours[16], const uint8_t theirs[16], struct pg_fault *why)
{
    uint64_t a[2], b[2];
    memcpy(a, ours, sizeof a);
    memcpy(b, theirs, sizeof b);
    return same(why, "private arena file: uuid of another arena", a[0], b[0]) &&
           same(why, "private arena file: uuid of another arena", a[1], b[1]);
}

static bool private_regions_fit(const struct pg_private *s, struct pg_fault *why)
{
    const struct private_plan p = private_plan(s->sessions, s->session_bytes, s->reply_bytes);
    return same(why, "private arena file: rows", p.rows, s->rows_offset) &&
           same(why, "private arena file: replies", p.replies, s->replies_offset) &&
           same(why, "private arena file: heap of the answer pool", p.heap, s->heap_offset) &&
           same(why, "private arena file: map of the answer pool", p.map, s->map_offset) &&
           same(why, "private arena file: answer pool", p.answers, s->answers_offset) &&
           same(why, "private arena file: results in the answer pool", answers_of(s->sessions),
                s->answers) &&
           same(why, "private arena file: length for its sessions", p.length, s->length);
}

static bool private_fits(const struct pg_private *s, const struct pg_header *h, uint64_t bytes,
                         struct pg_fault *why)
{
    if (bytes < sizeof *s)
        return same(why, "private arena file too small for its header", sizeof *s, bytes);
    return same(why, "private arena file: magic", PG_PRIVATE_MAGIC, s->magic) &&
           same(why, "private arena file: version mark", PG_PRIVATE_MAGIC, s->version) &&
           same(why, "private arena file: layout id", h->layout_id, s->layout_id) &&
           same(why, "private arena file: length", s->length, bytes) &&
           uuid_fits(h->uuid, s->uuid, why) &&
           same(why, "private arena file: window", PG_WINDOW, s->window) &&
           private_regions_fit(s, why);
}

static bool private_current(const struct pg_private *s, struct pg_fault *why)
{
    return same(why, "private arena file: bytes of a session", sizeof(struct pg_session),
                s->session_bytes) &&
           same(why, "private arena file: bytes of a reply", sizeof(struct pg_reply_memory),
                s->reply_bytes);
}

int pg_attach(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
              uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    if (!header_fits(arena, arena_bytes, layout_id, why))
        return 0;
    if (secret != NULL &&
        !(private_fits(secret, arena, secret_bytes, why) && private_current(secret, why)))
        return 0;
    handle_open(a, arena, secret);
    return 1;
}

int pg_attach_previous(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
                       uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why)
{
    memset(why, 0, sizeof *why);
    if (!header_known(arena, arena_bytes, layout_id, why) || !regions_inside(arena, why) ||
        !private_fits(secret, arena, secret_bytes, why))
        return 0;
    handle_open(a, arena, secret);
    return 1;
}

/* ---- check --------------------------------------------------------------------------- */

static bool tickets_check(const struct pg_header *h, struct pg_fault *fault)
{
    return next_number(h) - 1 < PG_TICKET_SHARD ||
           fault_set(fault, "header", "the next ticket, of this shard", h->shard,
                     h->shard * PG_TICKET_SHARD, h->next_ticket);
}

int pg_check(struct pg_arena *a, struct pg_fault *fault)
{
    uint64_t granules = 0;
    uint32_t jobs = 0;
    memset(fault, 0, sizeof *fault);
    return tickets_check(a->header, fault) && slots_check(&a->slots, fault) &&
           groups_check(a, fault) && members_check(a, fault) &&
           jobs_check(a, fault, &granules, &jobs) &&
           wheel_check(&a->wheel, (uint32_t)(a->metrics->live + a->metrics->unique_keys) + jobs,
                       fault) &&
           names_check(a, fault) && timers_check(a, fault, &granules) &&
           quotas_check(a, fault) &&
           replay_check(a, fault, &granules) && watermarks_check(a, fault, &granules) &&
           watches_check(a, fault) && operations_check(a, fault) && bulk_loads_check(a, fault) &&
           sweeps_check(a, fault) && schedules_check(a, fault, &granules) &&
           cursors_check(a, fault) && wal_buffer_check(a, fault) &&
           (a->secret == NULL || (sessions_check(a, fault, &granules) &&
                                  blobs_check(&a->blobs, granules, fault)));
}

static bool live_slot_sound(const struct pg_arena *a, uint32_t i, struct pg_fault *fault)
{
    const uint64_t ctl = LOAD_ACQUIRE(&slot_hot(a, i)->ctl);
    const struct pg_hot h = *slot_hot(a, i);
    const struct pg_cold c = *slot_cold(a, i);
    atomic_thread_fence(memory_order_acquire);
    if (ctl_state(ctl) != PG_S_ARMED || LOAD_ACQUIRE(&slot_hot(a, i)->ctl) != ctl)
        return true;
    if (!ticket_known(a->header, ctl_ticket(ctl)))
        return fault_set(fault, "slots", "a ticket that was never assigned", i,
                         LOAD_RELAXED(&a->header->next_ticket), ctl_ticket(ctl));
    if (!slot_sound(a, &h, &c))
        return fault_set(fault, "slots",
                         "an armed slot's topic, state, key or payload is invalid",
                         i, 0, h.topic);
    if (!slot_blob_inside(a, &c))
        return fault_set(fault, "slots", "a blob lies outside its region", i, a->blobs.granules,
                         c.blob);
    return true;
}

static bool live_entry_sound(const struct pg_arena *a, uint64_t position, struct pg_fault *fault)
{
    const struct pg_entry *e = replay_at(a, position);
    const uint64_t commit = LOAD_ACQUIRE(&e->commit);
    const struct pg_entry copy = *e;
    atomic_thread_fence(memory_order_acquire);
    if (commit != position + 1 || LOAD_ACQUIRE(&e->commit) != commit)
        return true;
    if (copy.topic >= a->topic_rows || copy.back > position ||
        (uint64_t)copy.blob + entry_granules(&copy) > a->blobs.granules)
        return fault_set(fault, "replay buffer",
                         "an entry's topic, key or payload is invalid",
                         position, a->topic_rows, copy.topic);
    return true;
}

int pg_check_live(const struct pg_arena *a, struct pg_fault *fault)
{
    memset(fault, 0, sizeof *fault);
    if (!header_fits(a->header, a->header->length, a->header->layout_id, fault))
        return 0;
    for (uint32_t i = 0; i < a->slots.capacity; i++)
        if (!live_slot_sound(a, i, fault))
            return 0;
    const uint64_t head = LOAD_ACQUIRE(&a->header->replay_head);
    const uint64_t tail = LOAD_ACQUIRE(&a->header->replay_tail);
    const uint64_t retained = tail - head < a->header->replay_capacity ? tail - head
                                                                       : a->header->replay_capacity;
    for (uint64_t p = tail - retained; p != tail; p++)
        if (!live_entry_sound(a, p, fault))
            return 0;
    return 1;
}

/* ---- values that the daemon stores for readers ----------------------------------------- */

const struct pg_header *pg_header_of(const struct pg_arena *a) { return a->header; }
const struct pg_metrics *pg_metrics_of(const struct pg_arena *a) { return a->metrics; }

void pg_set_state(struct pg_arena *a, uint32_t state, uint32_t pid)
{
    a->header->daemon_pid = pid;
    STORE_RELEASE(&a->header->state, state);
    pg_wake_all(&a->header->wake);
}

void pg_set_placement(struct pg_arena *a, const struct pg_placement *placement)
{
    a->header->placement = *placement;
}

void pg_set_daemon_state(struct pg_arena *a, uint32_t state, uint32_t why, int64_t since_boot_ns)
{
    a->header->daemon_why = why;
    a->header->daemon_since_boot_ns = since_boot_ns;
    STORE_RELEASE(&a->header->daemon_state, state);
}

void pg_drain(struct pg_arena *a, int draining) { a->state.draining = draining != 0; }

void pg_set_nameless(struct pg_arena *a, int nameless) { a->state.nameless = nameless != 0; }

void pg_confine(struct pg_arena *a) { a->state.confined = true; }

int pg_drained(const struct pg_arena *a)
{
    return a->metrics->live == a->metrics->schedules_armed && a->metrics->operations == 0 && a->metrics->outcomes == 0 &&
           a->header->published == a->header->replay_tail;
}

void pg_start_epoch(struct pg_arena *a, const uint8_t boot_id[16])
{
    memcpy(a->header->boot_id, boot_id, sizeof a->header->boot_id);
    STORE_RELEASE(&a->header->epoch, a->header->epoch + 1);
}

void pg_heartbeat(struct pg_arena *a, int64_t real_boot_ns, uint64_t iterations, uint64_t wakeups,
                  uint64_t sent, uint64_t log_dropped)
{
    a->header->loop_iterations = iterations;
    a->metrics->wakeups = wakeups;
    a->metrics->messages_sent = sent;
    a->metrics->log_dropped = log_dropped;
    pg_progress(a, real_boot_ns);
}

void pg_progress(struct pg_arena *a, int64_t real_boot_ns)
{
    STORE_RELEASE(&a->header->heartbeat_boot_ns, real_boot_ns);
}
