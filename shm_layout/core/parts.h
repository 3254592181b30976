/* parts.h - the parts that share the arena's handle: names, replay buffer, timers, sessions.
 * Included by core.h alone, after the parts that stand by themselves. */

/* A bounded output buffer: once `full` is set nothing more is written. */
struct sink {
    uint8_t *bytes;
    uint64_t used, size;
    bool full;
};

#define PG_NOTICE_WINDOW 1024     /* replay buffer entries that one pg_notices call looks at */

/* Entries of one topic within a window of the replay buffer, chained oldest first. */
struct pg_group {
    uint32_t topic, count;
    uint16_t first, last;         /* offsets from the window's start */
    uint64_t bytes;
};

#define PG_NEWS 16384             /* ends of an iteration that are fetched early; a batch has 1024
                                     at most */

/* What the parts of a rebuild find, for its end; PG_NIL = none. */
struct rebuild {
    uint64_t fired;               /* control word of the slot whose notice is committed; 0 = none */
    uint32_t fired_slot;
    uint32_t newest;              /* the slot with the newest ticket */
    uint32_t outcome;             /* the first one */
    uint32_t unsettled;           /* the first operation that may have to end, or to be asked for */
};

/* The running call: its sender, its batch and the record under way, and what it leaves for the
 * functions of api.h that are called behind it. */
struct call_state {
    int64_t moment_ns;            /* when, on the arena's clock: a message may have come after the
                                     advance */
    int64_t real_boot_ns;         /* the same on the real clock, */
    uint32_t real_s;              /* and in whole seconds */
    uint32_t visits_left;         /* eight keys of one operation are one */
    uint32_t uid;                 /* of the sender; PG_NIL = nobody's message */
    uint16_t account;             /* the sender's; 0 = none */
    uint32_t watch_key_share, watch_share;  /* what the sender may hold; UINT32_MAX = no limit */
    uint32_t operation_share, block_share;
    uint32_t blocks_held;         /* of bulk loads, by the sender; if it has a limit */

    /* The running batch. */
    uint64_t sequence;            /* 0 = none runs */
    bool durable;                 /* it is to be answered after its commit */
    bool reserved;                /* it names what is for PUBLISH alone */
    bool in_bulk_load;            /* the record under way is a row: */
    uint64_t bulk_load_row;
    uint32_t bulk_load;           /* of the batch */
    unsigned bulk_load_status;    /* why no row of it is admitted, or PG_ST_NONE */
    const struct put *parking;    /* the record under way parks this; NULL = it does not */
    struct pg_timestamps batch_timestamps; /* of what it arms, as far as it is known before */
    uint8_t name_uses[PG_BATCH_NAMES];      /* what its ops need of a name */
    uint8_t name_access[PG_BATCH_NAMES];    /* of the sender's uid in the namespace: access_of() */
    uint32_t name_namespaces[PG_BATCH_NAMES];
    uint32_t name_rows[PG_BATCH_NAMES];     /* topics of those that need one */
    struct pg_result name_refusals[PG_BATCH_NAMES]; /* ticket 0: it is there, or not needed */
    uint32_t hashes[PG_BATCH_RECORDS];
    uint32_t key_hashes[PG_WATCH_KEYS_MAX]; /* of the watch keys of the group under way */
    uint32_t rows[PG_WATCH_KEYS_MAX];       /* of the watch being armed */
    uint16_t seen[4 * PG_WATCH_KEYS_MAX];   /* hash set over rows[] */

    /* What the last call leaves. */
    uint64_t durable_lsn;         /* that its reply waits for; 0 = none */
    struct pg_session *worked;    /* on whose batch it worked; NULL = on none */
    int64_t begun_boot_ns;        /* of the batch that it has answered; 0 = none */
    uint32_t notified_first;      /* slots of the last OUTCOMES message, by inbox_next */
    uint32_t notified_count;
    uint32_t armed_count;         /* slots that it armed for a batch, for the time at which it
                                     returned */
    uint32_t armed[PG_BATCH_RECORDS];

    /* Of pg_notices. */
    struct pg_group groups[PG_NOTICE_WINDOW];
    uint16_t group_next[PG_NOTICE_WINDOW];
};

struct pg_arena {
    /* The mapping: where its regions are, and how many rows they have. */
    struct pg_header *header;
    struct pg_metrics *metrics;
    struct pg_histogram *histograms;
    struct pg_private *secret;    /* NULL for readers */
    struct pg_session *sessions;
    struct pg_reply_memory *replies;
    struct blob_pool answers;     /* of the private arena file: results of all replies */
    struct slots slots;           /* capacity + 1: one in reserve, so that replace works when
                                     full */
    struct wheel wheel;
    struct key_index index;
    struct blob_pool blobs;
    struct pg_namespace *namespaces;
    struct pg_topic *topics;
    uint32_t *name_index;         /* row + 1; namespaces first, topics behind them */
    struct pg_account *accounts;
    struct pg_entry *replay_buffer;
    struct pg_purgatory *purgatory;
    struct pg_watch *watches;
    struct pg_watched *watermarks;
    struct key_index watermark_index;
    struct pg_bulk_load *bulk_loads;
    struct pg_bulk_load_block *bulk_load_blocks;
    uint64_t *bulk_load_bits;
    struct key_index bulk_load_index;
    struct pg_wal_buffer *wal_buffer; /* NULL: no WAL */
    uint8_t *ring;
    struct pg_timestamps *timestamps; /* by slot; NULL: no WAL */
    uint32_t namespace_rows, topic_rows, name_cells, account_rows, watch_rows, watermark_rows;
    uint32_t bulk_load_rows, bulk_load_block_rows;

    /* State of this process, between calls. */
    bool draining;                /* nothing is armed any more */
    bool nameless;                /* nothing is armed: the arena is gone once the daemon ends */
    bool confined;                /* namespaces are born by NAMESPACE alone */
    bool restricted;              /* some namespace has an owner or a quota, or uids have quotas */
    bool inbox_news;              /* some session has something unsent */
    bool holding;                 /* operations that came due in an outage wait */
    int64_t hold_after_ns;        /* the outage: those due by then had had their turn */
    int64_t hold_upto_ns;         /* it ended */
    int64_t now_ns;               /* of the last advance, on the arena's clock */
    int64_t started_ns;           /* arena clock at the last rebuild, and the first ticket */
    uint64_t first_number;        /* of a ticket, given after it; 0 in a fresh arena */
    uint64_t wal_buffer_end;      /* position behind the frame being written */
    int64_t wall_placed_by_ns;    /* the offset that wall timers were last placed by */
    uint32_t wall_cursor;         /* next slot of a wall step under way; PG_NIL = none */
    uint32_t session_rows;        /* rows from here on are free */
    uint32_t free_bulk_load_block; /* the chain's first; PG_NIL = none */
    uint32_t bulk_load_block;     /* that a row was last looked up in, or PG_NIL */
    uint32_t orphans;             /* slots of outcomes and CHECKs of ended sessions, by
                                     inbox_next */
    uint64_t topics_stuck_at;     /* while this sum of ends is unchanged, no topic row is
                                     reusable */
    uint64_t topics_refused_at;   /* the same, of the topics of a uid that holds its share: */
    uint32_t topics_refused_uid, topics_refused_held;
    struct rebuild rebuild;
    struct call_state call;
    uint32_t news_count, news_seen;
    uint32_t news[PG_NEWS];       /* slots that came into inboxes last, to be fetched early */
};

/* ---- rows ---------------------------------------------------------------------------- */

/* The row with a number, which the caller knows to be inside its table. */
#define ROW(name, type, table, rows, part)                                                      \
    static inline struct type *name(const struct pg_arena *a, uint64_t row)                     \
    {                                                                                           \
        PG_ASSERT_IN_TESTS(row < a->rows, part, "a row is inside its table");                   \
        return &a->table[row];                                                                  \
    }
ROW(slot_hot, pg_hot, slots.hot, slots.capacity, "slots")
ROW(slot_cold, pg_cold, slots.cold, slots.capacity, "slots")
ROW(timestamps_at, pg_timestamps, timestamps, slots.capacity, "records")
ROW(namespace_at, pg_namespace, namespaces, namespace_rows, "names")
ROW(topic_at, pg_topic, topics, topic_rows, "names")
ROW(account_at, pg_account, accounts, account_rows, "quotas")
ROW(watch_at, pg_watch, watches, watch_rows, "watches")
ROW(watermark_at, pg_watched, watermarks, watermark_rows, "watermarks")
ROW(bulk_load_at, pg_bulk_load, bulk_loads, bulk_load_rows, "bulk loads")
ROW(bulk_load_block_at, pg_bulk_load_block, bulk_load_blocks, bulk_load_block_rows, "bulk loads")
ROW(session_at, pg_session, sessions, secret->sessions, "sessions")
#undef ROW

static inline const uint8_t *slot_key(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return blob_at(&a->blobs, c->blob) + c->ext_len;
}

static inline void time_set(struct pg_arena *a, int64_t now_ns, int64_t real_boot_ns)
{
    const bool later = a->header->clock_kind == PG_CLOCK_BOOT && real_boot_ns > now_ns;
    a->now_ns = now_ns;
    a->call.moment_ns = later ? real_boot_ns : now_ns;
    a->call.real_boot_ns = real_boot_ns;
    a->call.real_s = (uint32_t)(real_boot_ns / 1000000000);
}

/* ---- histograms -------------------------------------------------------------------- */

static inline uint32_t histogram_bucket(uint64_t ns)
{
    const uint32_t shift = 60 - (uint32_t)__builtin_clzll(ns | 8);
    return shift * 8 + (uint32_t)(ns >> shift);
}

/* Counts a span so many times; a clock that went back counts as 0. PG_UNMEASURED is for the
 * benchmark alone, which measures what this costs. */
static inline void measure(struct pg_arena *a, enum pg_histogram_id id, int64_t ns, uint64_t times)
{
#ifndef PG_UNMEASURED
    __extension__ typedef unsigned __int128 uint128;
    struct pg_histogram *h = &a->histograms[id];
    const uint64_t value = ns < 0 ? 0 : (uint64_t)ns;
    uint64_t sum;
    h->counts[histogram_bucket(value)] += times;
    if (UNLIKELY(__builtin_mul_overflow(value, times, &sum)))
        h->sum_high += (uint64_t)((uint128)value * times >> 64);
    h->sum_high += __builtin_add_overflow(h->sum_ns, sum, &h->sum_ns);
    if (value > h->max_ns)
        h->max_ns = value;
#else
    (void)a, (void)id, (void)ns, (void)times;
#endif
}

/* As in a METRICS record: how many buckets are not empty; the histograms with these. */
uint32_t histograms_used(const struct pg_arena *a);
void histograms_write(const struct pg_arena *a, struct pg_wal_histogram *to);

/* ---- names ------------------------------------------------------------------------- */

struct name {
    const char *bytes;
    uint32_t len;
};

/* Authoritative state: lengths within bounds, each topic in a namespace. */
bool names_sound(const struct pg_arena *a, struct pg_fault *why);
void names_rebuild(struct pg_arena *a);              /* the index from the rows */
/* Row of a namespace, or of a topic and its namespace, created if need be for the running call's
 * uid; PG_NIL: *why is the answer. */
uint32_t names_namespace(struct pg_arena *a, struct name ns, struct pg_result *why);
uint32_t names_topic(struct pg_arena *a, struct name ns, struct name topic,
                     struct pg_result *why);
/* Row of an existing pair's topic or namespace; PG_NIL = none. */
uint32_t names_find_namespace(const struct pg_arena *a, struct name ns);
/* It is not here, and for all that this arena knows it is in another shard. */
bool names_elsewhere(const struct pg_arena *a, struct name ns);
bool name_reserved(struct name name);
/* A held topic keeps its row, as if it had a timer. */
void names_hold(struct pg_arena *a, uint32_t topic);
void names_release(struct pg_arena *a, uint32_t topic);
/* Sets what `set` names of a namespace's settings. */
void names_configure(struct pg_arena *a, uint32_t row, const struct pg_namespace_set *set);
bool names_check(const struct pg_arena *a, struct pg_fault *fault);
static inline struct name namespace_name(const struct pg_arena *a, uint32_t row)
{
    return (struct name){namespace_at(a, row)->name, namespace_at(a, row)->name_len};
}
static inline struct name topic_name(const struct pg_arena *a, uint32_t row)
{
    return (struct name){topic_at(a, row)->name, topic_at(a, row)->name_len - 1};
}

/* ---- the WAL: frames ------------------------------------------------------------------ */

/* Bytes of a frame with so many behind its body, a multiple of 8; a pg_timestamps comes behind
 * that. */
uint64_t frame_bytes(enum pg_wal_type type, uint64_t extra);
/* Its type takes an LSN and its bytes are those that its body asks for. The head must be
 * readable, and as many bytes as the head says. */
bool frame_fits(const struct pg_frame_head *f);
/* What stands between body and key. */
static inline uint64_t wal_row_bytes(uint32_t in_bulk_load)
{
    return in_bulk_load != 0 ? sizeof(struct pg_wal_row) : 0;
}
static inline uint64_t wal_watch_extra(uint32_t keys, uint64_t bytes)
{
    return keys * sizeof(struct pg_wal_watch_key) + bytes;
}
struct pg_wal_namespace wal_namespace_of(uint32_t row, const struct pg_namespace *n,
                                         uint32_t name_len);
struct pg_wal_topic wal_topic_of(uint32_t row, const struct pg_topic *t, uint32_t name_len);
struct pg_wal_arm wal_arm_of(const struct pg_arena *a, uint32_t slot, const struct pg_hot *h,
                             const struct pg_cold *c, uint64_t ticket);
struct pg_wal_watch wal_watch_of(uint32_t slot, const struct pg_hot *h, const struct pg_cold *c,
                                 const struct pg_operation *op, uint64_t ticket);
struct pg_wal_watermark wal_watermark_of(const struct pg_arena *a, uint32_t row,
                                         const struct pg_watched *l, bool born);
struct pg_wal_entry wal_entry_of(uint64_t position, const struct pg_entry *e);
struct pg_wal_bulk_load wal_bulk_load_of(const struct pg_bulk_load *l);

/* ---- the WAL buffer ---------------------------------------------------------------- */

/* Each wal_append_* writes one frame, immediately before the store that makes its effect so, and
 * only when there is a WAL buffer: `if (has_wal(a)) wal_append_...`. The store has to follow before
 * the next frame, or the end of the call, which settles it: only then the group-commit thread sees
 * it. */
struct key;
static inline bool has_wal(const struct pg_arena *a) { return UNLIKELY(a->wal_buffer != NULL); }
void wal_append_namespace(struct pg_arena *a, uint32_t row, const struct pg_namespace *fields,
                          struct name name);
void wal_append_topic(struct pg_arena *a, uint32_t row, struct name name);
/* A timer whose fields are written, but for its control word; replaced: slot, PG_NIL = none. */
void wal_append_arm(struct pg_arena *a, uint32_t slot, uint64_t ticket, uint32_t replaced);
void wal_append_unpark(struct pg_arena *a, uint32_t slot);
void wal_append_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns, int64_t wall_ns);
void wal_append_end(struct pg_arena *a, uint32_t slot, enum pg_end_cause cause);
void wal_append_fire(struct pg_arena *a, uint32_t slot, const struct pg_entry *e);
void wal_append_sent(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns,
                     int64_t handed_boot_ns);
void wal_append_watch(struct pg_arena *a, uint32_t slot, uint64_t ticket);
/* What the row is going to be; at birth with its key, else NULL. */
void wal_append_watermark(struct pg_arena *a, uint32_t row, const struct pg_watched *fields,
                          const struct key *key);
void wal_append_gone(struct pg_arena *a, uint32_t row);
/* An operation whose cause, error, end and missing keys are written. */
void wal_append_outcome(struct pg_arena *a, uint32_t slot);
void wal_append_session(struct pg_arena *a, const struct pg_session *s);
/* A session whose fields are written, but for its id. */
void wal_append_opened(struct pg_arena *a, const struct pg_session *s, uint64_t id,
                       struct name name);
/* A notice that is going to be the newest entry. */
void wal_append_entry(struct pg_arena *a, const struct pg_entry *e);
void wal_append_bulk_load(struct pg_arena *a, const struct pg_bulk_load *fields);
void wal_append_done(struct pg_arena *a, uint32_t bulk_load, uint64_t row);

/* The body of a frame, with `extra` bytes behind it that the caller fills, and `tail` at its end
 * for what is recorded of beginning and end; then the frame is complete. */
void *wal_frame_begin_with(struct pg_arena *a, enum pg_wal_type type, uint64_t extra,
                           uint64_t tail);
void *wal_frame_begin(struct pg_arena *a, enum pg_wal_type type, uint64_t extra);
void wal_frame_end(struct pg_arena *a);
void wal_buffer_init(struct pg_arena *a);                     /* of a zeroed region */
void wal_buffer_settle(struct pg_arena *a);                   /* ends every call that may append */
/* The frame of which nobody knows whether its change was made; *frame = NULL: there is none. */
bool wal_buffer_in_doubt(const struct pg_arena *a, const struct pg_frame_head **frame,
                         struct pg_fault *why);
void wal_buffer_decide(struct pg_arena *a, const struct pg_frame_head *frame, bool made);
bool wal_buffer_check(const struct pg_arena *a, struct pg_fault *fault);

bool wal_buffer_over(const struct pg_arena *a, uint64_t percent);
unsigned wal_buffer_refuses(const struct pg_arena *a);
/* Why nothing may be armed or born now: BUSY over 75 %, WAL when it has stopped; else NONE. */
static inline unsigned wal_buffer_refusal(const struct pg_arena *a)
{
    return has_wal(a) ? wal_buffer_refuses(a) : (unsigned)PG_ST_NONE;
}
/* What ends, moves or advances waits then. Below that, any one of them fits with all that
 * follows from it. */
static inline bool wal_buffer_full(const struct pg_arena *a)
{
    return has_wal(a) && wal_buffer_over(a, 94);
}
/* The same with the answer, for what arms. False: it is refused. */
bool wal_buffer_admits(struct pg_arena *a, struct pg_result *r);
/* Of a full WAL buffer: false = wait; true = there will be no space again, and this is the
 * answer. */
bool wal_stopped(const struct pg_arena *a);
bool wal_buffer_gives_up(const struct pg_arena *a, struct pg_result *r);

/* Before anything is rebuilt: keeps or drops that frame. */
bool in_doubt_settle(struct pg_arena *a, struct pg_fault *why);

/* ---- slots that a rebuild finds ------------------------------------------------------------ */

/* What an armed slot or an outcome names is there; of its blob only the size is looked at. */
bool slot_sound(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c);
bool slot_blob_inside(const struct pg_arena *a, const struct pg_cold *c);

/* The steps of pg_rebuild, in this order. `keys` and `places` need nothing of each other and may
 * run at the same time in two threads, each with a fault of its own. */
int rebuild_begin(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
int rebuild_keys(struct pg_arena *a, struct pg_fault *why);
int rebuild_places(struct pg_arena *a, struct pg_fault *why);
int rebuild_end(struct pg_arena *a, struct pg_fault *why);

/* ---- timers ------------------------------------------------------------------------ */

struct key {
    const uint8_t *bytes;
    uint32_t hash;
    uint32_t namespace_row;
    uint32_t row_guess;           /* of a watch key; PG_NIL = none */
    uint8_t len, type;
};

struct put {
    struct key key;
    const uint8_t *payload;
    uint32_t payload_len;
    uint32_t topic;
    uint8_t mode, time_kind;
    int64_t time_ns;
    uint64_t ticket;              /* EXTEND: only this one; 0 = any timer, and no operation */
    uint16_t account;             /* of whose quota it is; 0 = nobody's */
    bool limited;                 /* quotas have to be asked */
};

/* PG_E_LATE of what was armed before this start of the daemon, and due before it; else 0. */
static inline unsigned late_flag(const struct pg_arena *a, const struct pg_hot *h)
{
    const bool before = ticket_number(ctl_ticket(h->ctl)) < a->first_number;
    return before && h->deadline_ns < a->started_ns ? PG_E_LATE : 0;
}
#define NO_WALL INT64_MIN

/* The scope that a key is hashed in, and what is kept of the hash. */
static inline uint64_t key_scope(uint32_t namespace_row, unsigned type)
{
    return (uint64_t)type << 32 | namespace_row;
}
static inline uint32_t key_hash_of(uint64_t hash) { return (uint32_t)(hash ^ hash >> 32); }
uint32_t key_hash(const struct pg_arena *a, uint32_t namespace_row, unsigned type,
                  const void *bytes, size_t len);
void timers_put(struct pg_arena *a, const struct put *put, struct pg_result *result);
/* Arms the parked timer of a key, if it has this ticket, with the payload that comes with it. */
void timers_unpark(struct pg_arena *a, const struct put *put, uint64_t ticket,
                   struct pg_result *result);
/* A key whose timer has fired. */
void cancel_fired(struct pg_arena *a, uint32_t id, uint64_t ticket, struct pg_result *r);
void cancel_timer(struct pg_arena *a, uint32_t slot, const struct probe *at);
void answer_slot(const struct pg_arena *a, struct pg_result *r, uint32_t slot, unsigned status);
/* False: nothing was changed, and the wheel keeps it: the replay buffer or the WAL buffer is
 * full. */
bool timer_expire(struct pg_arena *a, uint32_t slot);
/* The wall clock is so much ahead of the arena's. */
void wall_note(struct pg_arena *a, int64_t offset_ns);
/* After a step of the wall clock: walks the slots, a bounded number of them; a step during the walk
 * begins it again. True: some are left. */
bool wall_iteration(struct pg_arena *a, uint32_t budget);
/* Id of the armed slot or the replay buffer entry that speaks for a key; PG_NIL = neither. */
uint32_t key_find(const struct pg_arena *a, const struct key *key, struct probe *at);
/* The armed slot of a key; PG_NIL = none. */
uint32_t timers_find(const struct pg_arena *a, const struct key *key);
/* Deadline of an armed slot by the wall clock as it stands; needs authoritative state only. */
int64_t timers_deadline_ns(const struct pg_arena *a, uint32_t slot);
/* For a rebuild, of a living slot that is sound: the key leads to it, and it is counted. No other
 * slot has the key; `newest` is the one with the newest ticket, and takes the place of one that
 * has. It refuses to take that of an operation, which no put replaces. */
void timers_link_own(struct pg_arena *a, uint32_t slot);
bool timers_link_newest(struct pg_arena *a, uint32_t newest, struct pg_fault *why);
bool timers_check(struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);
static inline uint32_t slot_granules(const struct pg_cold *c)
{
    return blob_granules((uint64_t)c->ext_len + c->key_len + c->payload_len);
}
static inline uint32_t slot_namespace(const struct pg_arena *a, uint32_t slot)
{
    return topic_at(a, slot_hot(a, slot)->topic)->namespace_row;
}

/* The slot speaks for its key, and counts: it is armed or parked. */
static inline bool ctl_live(uint64_t ctl)
{
    return ctl_state(ctl) == PG_S_ARMED || ctl_state(ctl) == PG_S_PARKED;
}
static inline bool is_parked(const struct pg_arena *a, uint32_t slot)
{
    return ctl_state(slot_hot(a, slot)->ctl) == PG_S_PARKED;
}
/* When a timer was armed, to a sixteen millionth of its wait. */
static inline int64_t armed_ns_of(const struct pg_hot *h, const struct pg_cold *c)
{
    const uint32_t bits = (uint32_t)c->wait_high << 16 | h->wait_low;
    float wait_ns;
    memcpy(&wait_ns, &bits, sizeof wait_ns);
    const bool sound = (bits & INT32_MAX) < 0x5f000000;       /* 2^63; a NaN is above */
    return (int64_t)((uint64_t)h->deadline_ns - (uint64_t)(sound ? (int64_t)wait_ns : 0));
}
/* To be noted again when its deadline moves. */
static inline void armed_note(struct pg_hot *h, struct pg_cold *c, int64_t armed_ns)
{
#ifndef PG_UNMEASURED
    const float wait_ns = (float)(int64_t)((uint64_t)h->deadline_ns - (uint64_t)armed_ns);
    uint32_t bits;
    memcpy(&bits, &wait_ns, sizeof bits);
    h->wait_low = (uint16_t)bits;
    c->wait_high = (uint16_t)(bits >> 16);
#else
    (void)h, (void)c, (void)armed_ns;
#endif
}
/* Frees an armed or ended slot with `give` granules at its blob's start. */
void slot_free(struct pg_arena *a, uint32_t slot, uint32_t give);
void slot_place(struct pg_arena *a, uint32_t slot);      /* links a new one in the wheel */
void deadline_move(struct pg_arena *a, uint32_t slot, int64_t deadline_ns);    /* and no more */
void slot_counted(struct pg_arena *a, uint32_t slot, int64_t sign);
bool time_resolve(const struct pg_arena *a, const struct put *put, int64_t *deadline_ns);
/* An answer with a ticket is stored before the effect that it tells of: if a kill cuts the record
 * off, the rebuild sees by the ticket whether it holds (session.c). */
static inline void answer(struct pg_result *r, uint64_t ticket, unsigned status,
                          int64_t deadline_ns)
{
    r->deadline_ns = deadline_ns;
    STORE_RELEASE(&r->ticket, ticket << 8 | status); /* with it the answer is whole */
}
/* The last free slot is for a replacement, which needs two for a moment. */
static inline unsigned slots_status(const struct pg_arena *a, bool replacing)
{
    if (UNLIKELY(a->slots.free[0] <= (replacing ? 0u : 1u)))
        return PG_ST_FULL;
    return UNLIKELY(next_number(a->header) == PG_TICKET_SHARD) ? PG_ST_FULL_TICKETS : PG_ST_ADDED;
}

/* ---- quotas: who may do what, and how much ------------------------------------------------ */

enum { ACCESS_DENIED = 1, ACCESS_QUOTA = 2, ACCESS_RESERVED = 3 };
/* What stands between a uid and a namespace (PG_NIL: one that is not there yet); 0 = nothing. */
unsigned access_of(const struct pg_arena *a, uint32_t namespace_row, uint32_t uid);
/* To be called when an owner or a quota has changed. */
void restrictions_note(struct pg_arena *a);
/* Number of a uid's account, opened if need be; 0: all rows are in use. */
uint16_t account_of(struct pg_arena *a, uint32_t uid);
/* Makes *account, one of `from`, the account that its uid has in `to`. False: all rows of `to` are
 * in use. */
bool account_carry(struct pg_arena *to, const struct pg_arena *from, uint16_t *account);
static inline uint32_t account_uid(const struct pg_arena *a, uint16_t account)
{
    return account == 0 || account > a->account_rows ? PG_NIL : account_at(a, account - 1)->uid;
}
static inline void account_counted(struct pg_arena *a, uint16_t account, int64_t sign,
                                   uint64_t bytes)
{
    struct pg_account *c = account_at(a, account - 1);
    c->live += (uint64_t)sign;
    c->bytes += (uint64_t)sign * bytes;
}
static inline void account_watch_key_counted(struct pg_arena *a, uint16_t account, int32_t sign)
{
    if (LIKELY(account != 0))
        account_at(a, account - 1)->watch_keys += (uint32_t)sign;
}
uint32_t sessions_of(const struct pg_arena *a, uint32_t uid);           /* that are open */
/* To be called when a session of a uid is open, and when it has ended. */
void account_session_opened(struct pg_arena *a, uint32_t uid);
void account_session_ended(struct pg_arena *a, const struct pg_session *s);
/* Counts an operation that a session begins or ceases to own. */
void account_operation_counted(struct pg_arena *a, struct pg_session *s, int32_t sign);
/* Rows of a table with so many that the running call's uid may hold; UINT32_MAX = no limit. */
uint32_t share_of(const struct pg_arena *a, uint32_t rows);
/* The answer to a uid that holds its share of a table. */
void share_refuse(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r);
/* Whether the running call's uid, which holds so many rows, may have one more. False: *r says
 * what it holds. */
bool share_admits(const struct pg_arena *a, enum pg_quota quota, uint32_t rows, uint32_t held,
                  struct pg_result *r);
/* Before the records of a batch: the account of its uid, and that one's shares. */
void account_begin(struct pg_arena *a);
bool share_refuse_watch_key(const struct pg_arena *a, struct pg_result *r);          /* false */
bool share_refuse_watches(const struct pg_arena *a, struct pg_result *r);            /* false */
bool share_refuse_operation(const struct pg_arena *a, struct pg_result *r);          /* false */
/* Whether the running batch's uid may have one more watch key or operation, or so many more watch
 * records. A uid with a limit needs an account. */
static inline bool share_admits_watch_key(const struct pg_arena *a, struct pg_result *r)
{
    if (a->call.watch_key_share == UINT32_MAX ||
        (LIKELY(a->call.account != 0) &&
         LIKELY(account_at(a, a->call.account - 1)->watch_keys < a->call.watch_key_share)))
        return true;
    return share_refuse_watch_key(a, r);
}
static inline bool share_admits_watches(const struct pg_arena *a, uint32_t count,
                                        struct pg_result *r)
{
    if (a->call.watch_share == UINT32_MAX ||
        (LIKELY(a->call.account != 0) &&
         LIKELY((uint64_t)account_at(a, a->call.account - 1)->watches + count <=
                a->call.watch_share)))
        return true;
    return share_refuse_watches(a, r);
}
static inline bool share_admits_operation(const struct pg_arena *a, struct pg_result *r)
{
    if (a->call.operation_share == UINT32_MAX ||
        (LIKELY(a->call.account != 0) &&
         LIKELY(account_at(a, a->call.account - 1)->operations < a->call.operation_share)))
        return true;
    return share_refuse_operation(a, r);
}
/* Counts one operation. False: no account, or a quota of operations is used up: *r says which. */
bool quota_charge(struct pg_arena *a, uint32_t namespace_row, uint16_t account,
                  struct pg_result *r);
/* Whether a timer with so many granules may be armed in place of `old` (PG_NIL: none). False:
 * *r says which quota is used up. */
bool quota_admits(struct pg_arena *a, const struct put *put, uint64_t granules, uint32_t old,
                  struct pg_result *r);
/* Counts at 0: linking slots and watch keys counts. */
void quotas_rebuild(struct pg_arena *a);
void quotas_rebuild_sessions(struct pg_arena *a);    /* once all rows of sessions are sound */
void quotas_rebuild_operations(struct pg_arena *a);  /* once sessions know what they own */
bool quotas_check(const struct pg_arena *a, struct pg_fault *fault);

/* ---- bulk loads: rows that are done once --------------------------------------------------- */

uint32_t bulk_load_find(const struct pg_arena *a, const uint8_t id[16]);     /* PG_NIL: none */
uint32_t bulk_load_row_for_new(const struct pg_arena *a);               /* PG_NIL: all in use */
/* A new bulk load in that row, as its fields say. */
void bulk_load_write(struct pg_arena *a, uint32_t bulk_load, const struct pg_bulk_load *fields);
/* The bulk load of this id, begun if need be, for a run with this fencing token; a state above its
 * own takes its place. *status = NONE, or why not: DENIED, FENCED, QUOTA (the sender holds its share
 * of the bulk loads), FULL_BULK_LOADS, BUSY, WAL. */
uint32_t bulk_load_claim(struct pg_arena *a, const struct pg_bulk_load *wanted, unsigned *status);
/* The answer to a sender that holds its share of the bulk loads. */
void bulk_load_over_share(const struct pg_arena *a, struct pg_result *r);
void bulk_load_forget(struct pg_arena *a, uint32_t bulk_load);
void bulk_load_drop(struct pg_arena *a, uint32_t bulk_load); /* the same, not appended */
/* Sets a row's bit. False: there is no block for it. */
bool bulk_load_mark(struct pg_arena *a, uint32_t bulk_load, uint64_t row);
/* Whether a row is done; needs authoritative state only. */
bool bulk_load_row_visible(const struct pg_arena *a, const struct pg_wal_row *row);
/* Before the records of a batch, of that namespace. */
void bulk_load_begin(struct pg_arena *a, struct pg_session *s, const struct pg_rows *rows,
                     uint32_t namespace_row);
/* Of a PUT, before it is applied: whether this row may be done. False: answered. */
bool bulk_load_admits(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r);
/* Whether a PUT or UNPARK with this status has done the row, by what it said in its frame. */
static inline bool bulk_load_counts(unsigned status)
{
    return (status != PG_ST_NONE && status <= PG_ST_EXTENDED) || status == PG_ST_PARKED ||
           status == PG_ST_UNPARKED;
}
/* After it: what is done is marked so. */
void bulk_load_settle(struct pg_arena *a, const struct pg_result *r);
/* Of a CANCEL, before it is applied: the row will not be done any more. False: answered. */
bool bulk_load_void(struct pg_arena *a, const struct key *key, uint64_t row, struct pg_result *r);
/* Of the record that a session was about: whether its row is marked; marks it. */
bool bulk_load_has_row(const struct pg_arena *a, const struct pg_session *s);
void bulk_load_recover(struct pg_arena *a, const struct pg_session *s);
#define BULK_LOAD_PARTS 64        /* blocks in one answer to STATUS */
uint32_t bulk_load_pick(const struct pg_arena *a, uint32_t bulk_load, uint64_t from,
                        uint32_t picked[BULK_LOAD_PARTS], uint64_t *next);
struct pg_bulk_load_info bulk_load_info(const struct pg_arena *a, uint32_t bulk_load);
struct pg_bulk_load_part bulk_load_part(const struct pg_arena *a, uint32_t block);
void bulk_loads_init(struct pg_arena *a);
bool bulk_loads_rebuild(struct pg_arena *a, struct pg_fault *why);
bool bulk_loads_check(const struct pg_arena *a, struct pg_fault *fault);

/* ---- watermarks: watch keys ---------------------------------------------------------------- */

/* Short keys stand in the row, longer ones in a blob. */
static inline uint32_t watermark_granules(const struct pg_watched *l)
{
    return l->key_len <= sizeof l->key ? 0 : blob_granules(l->key_len);
}
static inline uint32_t watermark_blob(const struct pg_watched *l)
{
    uint32_t blob;
    memcpy(&blob, l->key, sizeof blob);
    return blob;
}
uint32_t watermark_find(const struct pg_arena *a, const struct key *key); /* PG_NIL: watermark 0 */
/* Writes `watch` with a watch key's watermark, and the key behind it; false: the row or its blob is
 * not inside, as where a reader followed what changed underneath. */
bool watermark_info(const struct pg_arena *a, uint32_t row, struct pg_info_watch *watch,
                    struct sink *out);
bool watermark_has_key(const struct pg_arena *a, uint32_t row, const struct key *key);
/* A new row at watermark 0 in the running batch's account; PG_NIL: *why is the answer. With
 * `to_join` it is forgotten until an operation joins it: if a kill comes before, it goes. */
uint32_t watermark_born(struct pg_arena *a, const struct key *key, bool to_join,
                        struct pg_result *why);
void watermark_free(struct pg_arena *a, uint32_t row);                      /* nobody watches it */
/* From now on it goes with its last watcher. */
static inline void watermark_forget(struct pg_arena *a, uint32_t row)
{
    watermark_at(a, row)->touched_s = PG_NIL;
}
/* Changes of a row by a command. Its watchers are visited afterwards. */
void watermark_set(struct pg_arena *a, uint32_t row, uint64_t watermark, uint32_t error);
void watermark_clear(struct pg_arena *a, uint32_t row);                     /* of its error */
void watermark_drop(struct pg_arena *a, uint32_t row);      /* now, or with its last watcher */
/* To be called when a watcher left: frees a forgotten row, or begins its time to live. */
void watermark_left_by_last(struct pg_arena *a, uint32_t row);
void watermark_left_by_one(struct pg_arena *a, uint32_t row);
static inline void watermark_left(struct pg_arena *a, uint32_t row)
{
    if (watermark_at(a, row)->root == PG_NIL)
        watermark_left_by_last(a, row);
    else if (has_wal(a))
        watermark_left_by_one(a, row);
}
void watermarks_init(struct pg_arena *a);
bool watermarks_rebuild(struct pg_arena *a, struct pg_fault *why); /* blobs, index, free list */
void watermarks_drop_forgotten(struct pg_arena *a); /* which a crash left without a watcher */
bool watermarks_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

/* ---- watches: who waits for which watermark -------------------------------------------------- */

/* Where watchers stand that the next advance of their key does not look at, in this order. */
#define PARKED (PG_WATERMARK_MAX + 1ull)  /* SUM, CLIENT: nothing can change for it on this key */
#define FAILED_FROM PARKED                /* ANY, QUORUM: the key failed; target + this */
#define MET UINT64_MAX                    /* ALL, QUORUM: the target is reached */

/* The target of ALL, ANY and QUORUM, MET included, of a watcher that stands at `place`. */
static inline uint64_t watch_target(uint64_t place)
{
    return place > FAILED_FROM && place != MET ? place - FAILED_FROM : place;
}

void watches_init(struct pg_arena *a);
/* A chain of so many siblings out of the free records, of which there are as many. */
uint32_t watches_take(struct pg_arena *a, uint32_t count);
void watches_give(struct pg_arena *a, uint32_t first);                  /* a whole chain */
void watch_free(struct pg_arena *a, uint32_t watch);                    /* one: for a rebuild */
void watch_link_among(struct pg_arena *a, uint32_t watch);              /* there are others */
void watch_unlink_among(struct pg_arena *a, uint32_t watch);
static inline void watch_link(struct pg_arena *a, uint32_t watch, uint64_t target)
{
    struct pg_watch *w = watch_at(a, watch);
    struct pg_watched *l = watermark_at(a, w->key_row);
    w->target = target;
    w->left = w->right = w->parent = PG_NIL;
    if (l->root == PG_NIL)
        l->root = l->first = l->latest = watch;
    else
        watch_link_among(a, watch);
}
static inline void watch_unlink(struct pg_arena *a, uint32_t watch)
{
    struct pg_watched *l = watermark_at(a, watch_at(a, watch)->key_row);
    if (l->first == l->latest)    /* it is the only one */
        l->root = l->first = l->latest = PG_NIL;
    else
        watch_unlink_among(a, watch);
}
/* The first of a key's watchers that stands above `target`; PG_NIL = none. */
uint32_t watch_above(const struct pg_arena *a, uint32_t row, uint64_t target);
bool watches_check(const struct pg_arena *a, struct pg_fault *fault);

/* ---- operations --------------------------------------------------------------------------- */

struct watch {
    const struct put *put;        /* key, payload, topic, time */
    uint64_t session, threshold;
    const uint8_t *keys;          /* struct pg_watch_key and bytes, validated */
    const uint32_t *hashes;       /* of the keys */
    uint32_t keys_bytes, count;
    uint8_t condition;
    bool notice;
    bool has_own;                 /* found out while it is armed: some key is its own; */
    bool may_end;                 /* it may have to end at once; */
    uint32_t ext;                 /* bytes of the blob before its key */
};

static inline bool has_targets(unsigned condition)
{
    return condition != PG_C_SUM && condition != PG_C_CLIENT;
}
static inline struct pg_operation *operation_at(const struct pg_arena *a, uint32_t slot)
{
    return (struct pg_operation *)blob_at(&a->blobs, slot_cold(a, slot)->blob);
}
static inline bool is_operation(const struct pg_arena *a, uint32_t slot)
{
    return (slot_hot(a, slot)->flags & PG_F_OPERATION) != 0;
}
static inline bool is_bulk_loaded(const struct pg_hot *h)
{
    return (h->flags & PG_F_BULK_LOADED) != 0;
}
/* For a walk over all slots: fetches an operation's blob so many slots ahead. */
#define OPERATIONS_PREFETCH 16
static inline void operation_prefetch(const struct pg_arena *a, uint32_t slot)
{
    if (slot >= a->slots.capacity || !is_operation(a, slot))
        return;
    fetch(operation_at(a, slot));
    fetch(operation_at(a, slot) + 1);
}
/* What an operation waits for: its keys go behind the payload, the rest into `info`. `op` is a copy
 * of the blob's head, and may be that of one which ended meanwhile. */
void operation_info(const struct pg_arena *a, const struct pg_operation *op, const uint8_t *blob,
                    struct pg_info *info, struct sink *out);
/* As a frame says that it was armed, in a slot that is free; in whose account. False: no space. */
bool operation_restore(struct pg_arena *a, const struct pg_wal_watch *j,
                       const struct pg_wal_watch_key *keys, uint16_t account);
/* As a frame says that an armed one ended: cause, missing keys; its own ones are forgotten. */
void operation_end_restore(struct pg_arena *a, const struct pg_wal_outcome *j,
                           const uint8_t *missing);
/* The notice of one that has its cause, which takes over the blob for it. */
struct pg_entry operation_notice(struct pg_arena *a, uint32_t slot, unsigned flags);
/* Gives back watch records and the notice's blob, while no derived state is there. */
void operation_release(struct pg_arena *a, uint32_t slot);
/* Its watch keys; `op` may be a copy of the head of its blob. */
void operation_keys_copy(const struct pg_arena *a, const struct pg_operation *op,
                         const uint8_t *blob, struct pg_wal_watch_key *out);
/* False: its notice would have no space in the replay buffer now; nothing was changed. */
bool operations_watch(struct pg_arena *a, struct watch *w, struct pg_result *result);
bool operation_may_end(struct pg_arena *a, uint32_t slot);
/* Cancels the timer or the operation that a key has. False: an operation's notice has no space in
 * the replay buffer now; nothing was changed. */
bool key_cancel(struct pg_arena *a, const struct key *key, uint64_t ticket,
                struct pg_result *result);
/* The owner found the condition false; asks him again if a watermark has moved meanwhile. */
void operation_answered_no(struct pg_arena *a, uint32_t slot);
/* Ends an armed operation that is linked in the wheel. */
void operation_end(struct pg_arena *a, uint32_t slot, enum pg_cause cause, uint32_t error);
/* From the wheel: looks once more, then ends. False: the replay buffer has no space now, or the
 * work of this call is used up. */
/* Whether it came due in the outage after which operations are held. */
bool operation_waits(const struct pg_arena *a, uint32_t slot);
bool operation_expire(struct pg_arena *a, uint32_t slot);
/* Each adds what it ended to result->deadline_ns and returns false when the visits of this
 * call are used up; the same call again continues. */
bool operations_advance(struct pg_arena *a, uint32_t row, uint64_t watermark,
                        struct pg_result *result);
/* `goes_on`: the key has its new state from the first call. */
bool operations_fail(struct pg_arena *a, uint32_t row, uint32_t error, bool goes_on,
                     struct pg_result *result);
bool operations_clear(struct pg_arena *a, uint32_t row, bool goes_on, struct pg_result *result);
/* Writes the ended keys to `out`: u8 type, u8 length, bytes. PG_NIL: nobody watches any more. */
void operations_cancel_for_key(struct pg_arena *a, uint32_t row, struct sink *out,
                               struct pg_result *result);
/* The count of a trigger that a kill cut off. */
void trigger_recover(const struct pg_arena *a, struct pg_result *result);
bool operations_complete(struct pg_arena *a, const struct key *key, uint64_t session,
                         uint64_t version, struct pg_result *result);
/* For a rebuild: all records first; then armed operations that may be looked at, in groups, and
 * *count is 0 again; at the end all that waits for the rest, from these slots on. */
void watches_unclaim(struct pg_arena *a);
bool operations_link(struct pg_arena *a, const uint32_t *slots, uint32_t *count,
                     struct pg_fault *why);
void operations_settle(struct pg_arena *a, uint32_t outcome, uint32_t unsettled);
bool operations_check(const struct pg_arena *a, struct pg_fault *fault);
uint64_t notice_granules(const struct pg_arena *a, uint32_t slot);      /* it has one */
/* Of an operation's notice, while it has not left. */
static inline uint64_t operation_granules(const struct pg_arena *a, uint32_t slot)
{
    return LIKELY(operation_at(a, slot)->notice_blob == PG_NIL) ? 0 : notice_granules(a, slot);
}
/* All blob bytes of an armed slot. */
static inline uint64_t slot_bytes(const struct pg_arena *a, uint32_t slot)
{
    const uint64_t notice = is_operation(a, slot) ? operation_granules(a, slot) : 0;
    return (slot_granules(slot_cold(a, slot)) + notice) * PG_GRANULE;
}

/* ---- prefetch ------------------------------------------------------------------------------- */

#define PG_PREFETCH_MAX 32        /* most ids that one of these calls takes */

/* What operations on watch keys will touch. hashes[places[i]] is the i-th key's, reach[i] up to
 * which watermark its watchers will be visited; rows[places[i]] = the row that it may have. */
void prefetch_watermarks(const struct pg_arena *a, const uint32_t *hashes, const uint32_t *places,
                         const uint64_t *reach, uint32_t count, uint32_t *rows);
void prefetch_ends(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* What putting operations into their places touches first. */
void prefetch_links(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
void prefetch_outcomes(const struct pg_arena *a, const uint32_t *slots, uint32_t count);
/* To be called before each outcome of an inbox is looked at: the list leads only from blob to
 * blob. The order is that of all inboxes together. */
void prefetch_news(struct pg_arena *a);
/* Key and payload, of what is short. */
void prefetch_bytes(const struct pg_arena *a, uint32_t slot);

/* ---- inboxes ------------------------------------------------------------------------------- */

void inbox_add(struct pg_arena *a, uint32_t slot); /* the owner's; frees an ownerless outcome */
void inbox_remove(struct pg_arena *a, uint32_t slot);
static inline bool inbox_full(const struct pg_arena *a, const struct pg_session *s)
{
    return s->owned >= a->purgatory->inbox_max;
}
/* Of a session that ends: what is in it is freed, some now, the rest by orphans_free. */
void inbox_drop(struct pg_arena *a, struct pg_session *s);
bool orphans_free(struct pg_arena *a);                   /* a bounded number; true: some are left */
void inboxes_reset(struct pg_arena *a);
/* ACK of an outcome (version 0) or of a CHECK. True: the owner found the condition false. */
bool inbox_acknowledge(struct pg_arena *a, struct pg_session *s, const struct pg_ack *ack);

/* Bytes that an operation's notice has before its own payload, at most. */
#define PG_VERDICT_MAX (sizeof(struct pg_verdict) + PG_WATCH_KEYS_MAX / 8)

/* ---- replay buffer ------------------------------------------------------------------------- */

static inline struct pg_entry *replay_at(const struct pg_arena *a, uint64_t position)
{
    return &a->replay_buffer[position & (a->header->replay_capacity - 1)];
}
static inline uint32_t replay_id(const struct pg_arena *a, uint64_t position)
{
    return a->slots.capacity + (uint32_t)(position & (a->header->replay_capacity - 1));
}
static inline unsigned entry_flags(const struct pg_entry *e) { return e->meta >> 4; }
static inline unsigned entry_key_type(const struct pg_entry *e) { return e->meta & 15; }
static inline uint32_t entry_granules(const struct pg_entry *e)
{
    return blob_granules((uint64_t)e->key_len + e->payload_len);
}
/* Whether one more entry with so many blob bytes goes in without withdrawing one that was
 * not handed to the socket yet; withdraws the oldest as needed. */
bool replay_make_space(struct pg_arena *a, uint64_t bytes);
/* Appends; the entry takes the blob over (key at its start). Returns its position. */
uint64_t replay_append(struct pg_arena *a, const struct pg_entry *fields);
void replay_supersede(struct pg_arena *a, uint32_t id);
/* Rolls a half-done append forward and drops the withdrawn. */
bool replay_settle(struct pg_arena *a, struct pg_fault *why);
bool replay_rebuild(struct pg_arena *a, struct pg_fault *why); /* marks blobs, indexes keys */
/* The head of a body of `count` notices from sequence `first`, and one record of it. */
struct pg_notices notices_head(const struct pg_arena *a, uint32_t topic, uint64_t first,
                               uint32_t count);
struct pg_notice notice_of(const struct pg_entry *e);
bool replay_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

/* ---- sessions ------------------------------------------------------------------------ */

static inline uint32_t row_of_session(uint64_t id) { return (uint32_t)(id & 0xffff); }
static inline struct pg_session *session_find(const struct pg_arena *a, uint64_t id)
{
    if (id == 0 || row_of_session(id) >= a->secret->sessions)
        return NULL;
    struct pg_session *s = session_at(a, row_of_session(id));
    return s->id == id ? s : NULL;
}
/* The session of a nonce, opened if need be; NULL: the uid holds its share of them and *why says
 * so, or all rows are in use and why->ticket is 0. */
struct pg_session *session_open(struct pg_arena *a, const uint8_t nonce[16], uint32_t uid,
                                uint32_t pid, int64_t grace_ns, struct name worker,
                                struct pg_result *why);
/* How long the most silent session has been silent. */
int64_t sessions_silence_ns(const struct pg_arena *a);
/* Whether the record that it owes can be written; with the WAL stopped it owes none. */
bool session_may_end(const struct pg_arena *a);
void session_end(struct pg_arena *a, struct pg_session *s);
struct pg_reply_memory *session_reply(const struct pg_arena *a, const struct pg_session *s,
                                      uint64_t sequence);
/* A record that has no name is answered before the batch's first one is applied: what the batch
 * itself ends may make space for the name, and after a kill it would be there for the rest. */
static inline bool name_refused(const struct pg_result *r)
{
    const unsigned quota = r->ticket >> 8 & 0xff;
    if (UNLIKELY((r->ticket & 0xff) == PG_ST_QUOTA))
        return quota == PG_Q_UID_TOPICS || quota == PG_Q_UID_NAMESPACES;
    return r->ticket == PG_ST_FULL_TOPICS || r->ticket == PG_ST_FULL_NAMESPACES ||
           r->ticket == PG_ST_BUSY || r->ticket == PG_ST_WAL;
}
#define PG_ENDED_KEYS_BYTES 16384 /* of the keys that CANCEL_FOR_KEY ends in one batch */
/* What its ended keys hold now. */
uint32_t reply_granules(const struct pg_reply_memory *m);
/* Granules of the answer pool that its results hold now. */
uint32_t answer_granules(const struct pg_reply_memory *m);
/* Its results; NULL: it holds none. */
static inline struct pg_result *reply_results(const struct pg_arena *a,
                                              const struct pg_reply_memory *m)
{
    return m->answers == PG_NIL ? NULL : (struct pg_result *)blob_at(&a->answers, m->answers);
}
/* Frees what a reply remembers, before its memory serves another batch. */
void reply_forget(struct pg_arena *a, struct pg_reply_memory *m);
/* Prepares an empty reply for `count` results, all 0. If the pool has no space, sessions that sent
 * nothing for a minute lose their results. False: all others are recent, and nothing changed. */
bool reply_begin(struct pg_arena *a, const struct pg_session *s, struct pg_reply_memory *m,
                 uint32_t count);
bool sessions_rebuild(struct pg_arena *a, struct pg_fault *why);
/* Of each record under way: its answer holds, or it is applied when it is sent again. */
/* The record under way is one on a watch key, whose intent it is. */
static inline bool on_watch_key(const struct pg_session *s)
{
    return s->current != 0 && s->intent[0] == s->applied + 1ull;
}

/* A batch of it was not applied to its end. */
static inline bool record_under_way(const struct pg_session *s)
{
    return s->id != 0 && s->current != 0 && s->applied < s->count;
}

void sessions_recover(struct pg_arena *a);
/* The answer of a record under way that ends operations on a watch key; NULL = none. */
struct pg_result *session_trigger(const struct pg_arena *a, uint32_t row);
bool sessions_check(const struct pg_arena *a, struct pg_fault *fault, uint64_t *granules);

/* ---- from one arena into another ---------------------------------------------------------- */

uint32_t blob_copy(struct pg_arena *to, const struct pg_arena *from, uint32_t blob,
                   uint32_t granules);               /* PG_NIL: no space */
/* Copies what the replies of a session hold; `to` has a copy of the rows. */
bool replies_migrate(struct pg_arena *to, const struct pg_arena *from, uint32_t session,
                     struct pg_fault *why);
/* The namespace of a slot in use, also of an outcome; PG_NIL: none has its key. */
uint32_t slot_home(const struct pg_arena *a, uint32_t slot);

/* ---- output --------------------------------------------------------------------------- */

void *sink_take(struct sink *s, uint64_t bytes);     /* NULL and full when it does not fit */
void sink_put(struct sink *s, const void *bytes, uint64_t len);
/* A reader's copy of a slot's cold half, where it has found this control word. */
struct pg_cold slot_cold_copy(const struct pg_arena *a, uint32_t slot, uint64_t ctl);
/* What a reader copied may be half of one timer and half of the next: whether all that it names
 * is inside, so that it may be read. */
bool slot_copy_bounded(const struct pg_arena *a, const struct pg_hot *h, const struct pg_cold *c);
/* One struct pg_info with names, key and payload; false (and nothing written) when it does
 * not fit or the slot changed underneath. */
bool info_write(const struct pg_arena *a, uint32_t slot, uint64_t ctl, struct sink *out);
