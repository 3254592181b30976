/* api.h - the functions of the core that Python calls; cffi parses it, so: no guard, no
 * include, no inline. Needs layout.h before it. A handle is private to a process and to
 * one thread at a time; functions that return int give 1 for yes or done, 0 for no. */

struct pg_fault {                 /* the first broken invariant, or why something was refused */
    char part[16];
    char what[96];
    uint64_t where;
    uint64_t expected;
    uint64_t found;
};

struct pg_config {                /* what an arena is created with */
    uint64_t layout_id;
    uint64_t payload_bytes;       /* rounded up to granules */
    uint64_t outbox_bytes_max;
    int64_t tick_ns;
    int64_t now_ns;
    int64_t wall_offset_ns;
    int64_t created_wall_ns;
    int64_t wall_origin_ns;
    uint64_t stream_id;           /* not 0 */
    uint64_t secret[2];
    uint8_t uuid[16];
    uint8_t boot_id[16];
    uint32_t capacity;
    uint32_t outbox_capacity;     /* a power of two */
    uint32_t fanout;
    uint32_t namespaces;
    uint32_t topics;
    uint32_t sessions;
    uint32_t watches;             /* records: a key of an operation each */
    uint32_t levels;              /* watch keys */
    uint32_t accounts;            /* uids that may have timers while uids have quotas */
    uint64_t level_ttl_ns;
    uint64_t inbox_max;
    uint32_t page_size;
    uint32_t clock_kind;
    uint32_t shard;
    uint32_t shards;
};

struct pg_arena;                  /* a process's handle; pg_handle_bytes() of memory */

/* ---- life of an arena (arena.c, migrate.c) --------------------------------------- */

uint64_t pg_handle_bytes(void);
/* Bytes of either segment; 0 = a value is out of its bounds. */
uint64_t pg_arena_bytes(const struct pg_config *config);
uint64_t pg_private_bytes(const struct pg_config *config);
/* Bytes of one region of the arena that `config` would give. */
uint64_t pg_region_bytes(const struct pg_config *config, uint32_t region);
/* Both segments must be zeroed memory of at least those sizes. */
int pg_create(struct pg_arena *a, void *arena, void *secret, const struct pg_config *config);
/* secret = NULL: a reader. Refuses what does not fit, with both values in `why`. */
int pg_attach(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
              uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why);
/* The same for an arena of an earlier minor ABI with this layout id; for pg_convert alone. */
int pg_attach_previous(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
                       uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why);
/* Rebuilds all that is derived; required after attach, before anything is changed.
 * now_ns is the arena's clock. Entries that fired but were not handed over stay so. */
int pg_rebuild(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
/* Copies all truth of `from` into the fresh arena `to` (other sizes): tickets, sequences,
 * sessions stay. Refuses what has no room, with both values. */
int pg_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why);
/* Copies all truth of `from`, of an earlier minor ABI, as it stands into the fresh arena `to` of
 * the same sizes; pg_rebuild must follow. Refuses other sizes, with both values. */
int pg_convert(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why);
int pg_check(struct pg_arena *a, struct pg_fault *fault);
/* Holds on a live arena too, from a reader. */
int pg_check_live(const struct pg_arena *a, struct pg_fault *fault);

/* ---- time (timers.c) --------------------------------------------------------------- */

/* Fires what is due. Returns timers fired or moved, at most `budget`; *more = due work is
 * left: over the budget, or the outbox waits for pg_published. wall_offset_ns: wall time
 * minus the arena's clock, now; a step re-places wall timers in bounded turns. */
uint32_t pg_advance(struct pg_arena *a, int64_t now_ns, int64_t wall_offset_ns,
                    int64_t real_boot_ns, uint32_t budget, int *more);
/* When pg_advance has to be called next; <= now = at once, INT64_MAX = nothing armed. */
int64_t pg_next_ns(const struct pg_arena *a);

/* ---- commands (messages.c) ---------------------------------------------------------- */

enum pg_handled {
    PG_H_REPLY,                   /* *reply_bytes of reply are to be sent */
    PG_H_AGAIN,                   /* bounded work is used up: call again with the same message */
    PG_H_SILENT,                  /* nothing is to be sent */
    PG_H_WAIT                     /* a batch for a later virtual time: advance to *wait_ns, call again */
};
/* Decodes, validates and applies one command-lane message. Never fails: whatever the
 * bytes are, the reply says so. `reply` has PG_MESSAGE_MAX bytes. uid and pid are the
 * sender's, from the kernel; real_boot_ns is CLOCK_BOOTTIME also under the virtual clock. */
int pg_handle(struct pg_arena *a, const void *message, uint64_t message_bytes, uint32_t uid,
              uint32_t pid, int64_t real_boot_ns, void *reply, uint64_t *reply_bytes,
              int64_t *wait_ns);

/* ---- owners and quotas (quotas.c, messages.c) ---------------------------------------------- */

/* Quotas of every uid, from now on: timers, blob bytes, operations per second; 0 = none. */
void pg_set_quotas(struct pg_arena *a, uint64_t timers, uint64_t bytes, uint64_t ops);
/* The body of a NAMESPACE message. Returns enum pg_error with its figures in `detail`; *now = the
 * settings as they stand. */
int pg_set_namespace(struct pg_arena *a, const void *body, uint64_t bytes,
                     struct pg_namespace_set *now, uint64_t detail[2]);

/* One timer without a message: for tests, imports and use inside one process. */
struct pg_put {
    const char *namespace_name;
    const char *topic_name;
    const uint8_t *key;
    const uint8_t *payload;
    uint32_t payload_len;
    uint8_t namespace_len;
    uint8_t topic_len;
    uint8_t key_len;
    uint8_t key_type;
    uint8_t mode;
    uint8_t time_kind;
    int64_t time_ns;
};
void pg_put(struct pg_arena *a, const struct pg_put *put, struct pg_result *result);
void pg_cancel(struct pg_arena *a, const struct pg_put *key, uint64_t ticket,
               struct pg_result *result);
/* A struct pg_info with its names, key and payload; returns its bytes. */
uint64_t pg_get(struct pg_arena *a, const struct pg_put *key, void *out, uint64_t out_bytes);

/* ---- notices (notices.c) ----------------------------------------------------------- */

struct pg_part {                  /* one message inside an output buffer */
    uint64_t subject;             /* offset of frame 1 */
    uint64_t body;                /* offset of frame 2 */
    uint32_t subject_bytes;
    uint32_t body_bytes;
};
/* Messages for entries that were not handed to the socket yet, a message per topic, in
 * order. *upto = position to give to pg_published once all are sent. */
uint32_t pg_notices(struct pg_arena *a, void *out, uint64_t out_bytes, struct pg_part *parts,
                    uint32_t parts_max, uint64_t *upto);
void pg_published(struct pg_arena *a, uint64_t upto);
/* Tail heartbeats of topics that changed since `since_boot_ns`, from row *cursor on. */
uint32_t pg_tails(struct pg_arena *a, int64_t since_boot_ns, uint32_t *cursor, void *out,
                  uint64_t out_bytes, struct pg_part *parts, uint32_t parts_max);

/* ---- inboxes (inbox.c) ----------------------------------------------------------------- */

/* The next OUTCOMES message for some session that has something unsent; returns its bytes
 * and names the session, 0 = nothing. `out` is aligned to 8 bytes. */
uint64_t pg_inbox(struct pg_arena *a, uint64_t *session, void *out, uint64_t out_bytes);
/* Sends everything again that was not acknowledged: of one session, or with session 0 of all
 * in which nothing was sent or acknowledged since `idle_since_boot_ns`. */
void pg_inbox_again(struct pg_arena *a, uint64_t session, int64_t idle_since_boot_ns);
/* Frees levels past their time to live, `budget` rows from *cursor on. */
void pg_sweep(struct pg_arena *a, int64_t real_boot_ns, uint32_t *cursor, uint32_t budget);

/* ---- readers (scan.c): safe on a live arena ------------------------------------------ */

/* Row of a topic, or PG_NIL. */
uint32_t pg_find_namespace(const struct pg_arena *a, const char *name, uint32_t len);
uint32_t pg_find_topic(const struct pg_arena *a, uint32_t namespace_row, const char *name,
                       uint32_t len);
/* Armed timers from slot *cursor on, as struct pg_info with names, key and payload.
 * Returns bytes written; *cursor = capacity + 1 at the end. */
uint64_t pg_scan(const struct pg_arena *a, uint32_t *cursor, uint32_t max, void *out,
                 uint64_t out_bytes);
/* Notices first..last of a topic as one body, oldest first, as many as fit. `positions`
 * has room for last - first + 1. *lost = highest sequence of the range that is gone
 * (first - 1 = none), *got = highest sequence in the body. */
uint64_t pg_replay(const struct pg_arena *a, uint32_t topic, uint64_t first, uint64_t last,
                   uint64_t *positions, void *out, uint64_t out_bytes, uint64_t *lost,
                   uint64_t *got);
const struct pg_header *pg_header_of(const struct pg_arena *a);
const struct pg_metrics *pg_metrics_of(const struct pg_arena *a);
void pg_set_state(struct pg_arena *a, uint32_t state, uint32_t pid);
/* From now on nothing is armed: PUT and WATCH get PG_ST_STOPPING. */
void pg_drain(struct pg_arena *a);
/* Nothing is armed, no outcome waits for its acknowledgement, and the socket has all notices. */
int pg_drained(const struct pg_arena *a);
void pg_start_epoch(struct pg_arena *a, const uint8_t boot_id[16]);
void pg_beat(struct pg_arena *a, int64_t real_boot_ns, uint64_t turns, uint64_t wakeups,
             uint64_t sent);

/* ---- a wheel in private memory (local.c) ------------------------------------------------- */

struct pg_local;
uint64_t pg_local_bytes(uint32_t capacity, int64_t tick_ns, uint32_t fanout);
/* `memory`: that many bytes, aligned to 16. */
struct pg_local *pg_local_create(void *memory, uint32_t capacity, int64_t tick_ns,
                                 uint32_t fanout, int64_t now_ns);
/* A slot, to cancel by; it is free again once it was cancelled or given out as due. PG_NIL:
 * all are taken. */
uint32_t pg_local_add(struct pg_local *l, int64_t deadline_ns);
void pg_local_cancel(struct pg_local *l, uint32_t slot);
/* Writes due slots to `due`; *more = call again at once. */
uint32_t pg_local_advance(struct pg_local *l, int64_t now_ns, uint32_t *due, uint32_t due_max,
                          int *more);
int64_t pg_local_next_ns(const struct pg_local *l);
int pg_local_check(const struct pg_local *l, struct pg_fault *fault);
