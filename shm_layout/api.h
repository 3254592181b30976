/* api.h - the functions of the core that Python calls; cffi parses it, so: no guard, no
 * include, no inline. Needs layout.h before it. A handle is private to a process and to
 * one thread at a time; functions that return int give 1 for yes or done, 0 for no. */

struct pg_fault {                 /* the first broken invariant, or why something was refused */
    char part[16];
    char detail[96];
    uint64_t where;
    uint64_t expected;
    uint64_t found;
};

struct pg_config {                /* what an arena is created with */
    uint64_t layout_id;
    uint64_t payload_bytes;       /* rounded up to granules */
    uint64_t replay_bytes_max;
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
    uint32_t replay_capacity;     /* a power of two */
    uint32_t fanout;
    uint32_t namespaces;
    uint32_t topics;
    uint32_t sessions;
    uint32_t watches;             /* records: a key of an operation each */
    uint32_t watermarks;          /* watch keys */
    uint32_t accounts;            /* uids that may have sessions, timers or watch keys */
    uint32_t bulk_loads;          /* bulk loads that are remembered; 0 = none can be */
    uint32_t bulk_load_blocks;    /* of PG_BULK_LOAD_BLOCK_ROWS of their rows each */
    uint64_t watermark_ttl_ns;
    uint64_t inbox_max;
    uint64_t wal_buffer_bytes;    /* of the WAL's ring, a power of two; 0 = no WAL */
    uint32_t page_size;
    uint32_t clock_kind;
    uint32_t shard;
    uint32_t shards;              /* 0 as 1: alone */
};

struct pg_arena;                  /* a process's handle; pg_handle_bytes() of memory */

/* ---- lifecycle of an arena (arena.c, migrate.c) --------------------------------------- */

uint64_t pg_handle_bytes(void);
/* Bytes of either arena file; 0 = a value is out of its bounds. */
uint64_t pg_arena_bytes(const struct pg_config *config);
uint64_t pg_private_bytes(const struct pg_config *config);
/* Both arena files must be zeroed memory of at least those sizes. */
int pg_create(struct pg_arena *a, void *arena, void *secret, const struct pg_config *config);
/* secret = NULL: a reader. Refuses what does not fit, with both values in `why`. */
int pg_attach(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
              uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why);
/* The same for an arena of an earlier minor ABI with this layout id; for pg_convert alone. */
int pg_attach_previous(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
                       uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why);
/* Rebuilds all derived state; required after attach, before anything is changed.
 * now_ns is the arena's clock. Entries that fired but were not handed over stay so. */
int pg_rebuild(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
/* The same, with a second thread while it lasts, if the machine has one for us. */
int pg_rebuild_threaded(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
/* Copies all authoritative state of `from` into the fresh arena `to` (other sizes): tickets,
 * sequences, sessions and LSNs stay. Refuses what has no space, with both values. Slots and rows
 * get other numbers: frames from before cannot be redone over a snapshot from after, nor the
 * reverse. */
int pg_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why);
/* Copies all authoritative state of `from`, of an earlier minor ABI, as it stands into the fresh
 * arena `to` of the same sizes; pg_rebuild must follow. Refuses other sizes, with both values. What
 * `from` appended is sound then, the frame in doubt is decided there too, and it may be brought to
 * its WAL. */
int pg_convert(struct pg_arena *to, struct pg_arena *from, struct pg_fault *why);
int pg_check(struct pg_arena *a, struct pg_fault *fault);
/* Holds on a live arena too, from a reader. */
int pg_check_live(const struct pg_arena *a, struct pg_fault *fault);

/* ---- shards (merge.c, namespace_stats.c) -------------------------------------------------- */

/* The partition that a key is in: CRC-32C of its bytes, modulo. */
uint32_t pg_partition(const void *key, uint64_t bytes, uint32_t partitions);

struct pg_route {                 /* of a namespace: which shards take it */
    const uint32_t *shards;       /* one for each partition of its keys */
    uint32_t partitions;          /* 0: none takes it */
    uint32_t fresh_topics;        /* 1: it comes from several arenas or goes to several, so its
                                     topics start over, and what was sent already stays behind */
};
struct pg_source {                /* an arena, attached with its private arena file and rebuilt */
    const struct pg_arena *arena;
    const struct pg_route *routes;            /* by row of its namespaces */
    uint32_t *namespaces, *topics, *watermarks, *sessions, *bulk_loads;  /* scratch, by its rows */
    uint64_t next;                /* scratch */
};
/* Copies what belongs to the shard of the fresh arena `to` out of all these; pg_rebuild must
 * follow. Tickets stay, and `to` goes on behind all that any of them gave, so all arenas of a
 * deployment have to be among the sources, also those of which nothing is taken. A session keeps
 * its nonce and its replies, and gets another id. Counters begin at 0. Refuses what has no space,
 * with both values. */
int pg_merge(struct pg_arena *to, struct pg_source *sources, uint32_t count,
             struct pg_fault *why);

struct pg_namespace_stats {       /* what a namespace has in one arena */
    uint64_t timers, parked, operations, outcomes, watermarks;
    uint64_t notices;             /* not sent yet */
    uint64_t bulk_loads;
    uint64_t topics;
    uint64_t digest;              /* of timers to notices: adds up over the arenas of a
                                     deployment */
    uint64_t settings;            /* digest */
    uint64_t streams;             /* digest of topics and bulk loads */
};
/* By row of the namespaces, of an arena that nobody changes meanwhile. Refuses an outcome whose
 * namespace nobody can tell. */
int pg_namespace_stats(const struct pg_arena *a, struct pg_namespace_stats *rows,
                       struct pg_fault *why);

/* ---- time (timers.c) --------------------------------------------------------------- */

/* Fires what is due. Returns timers fired or moved, at most `budget`; *more = due work is
 * left: over the budget, or the replay buffer waits for pg_published. wall_offset_ns: wall time
 * minus the arena's clock, now; a step re-places wall timers in bounded iterations. */
uint32_t pg_advance(struct pg_arena *a, int64_t now_ns, int64_t wall_offset_ns,
                    int64_t real_boot_ns, uint32_t budget, int *more);
/* After an outage of the caller, which lasted from `after_ns` to `upto_ns` on the arena's clock:
 * operations do not expire until pg_release_operations, so that triggers which were sent in time
 * are applied before. Exempt is what was due by `after_ns`, and what is armed after `upto_ns` and
 * due after it. Timers fire as always. Another outage before the release goes on with the same hold.
 * False: operations wait already, so the caller may put off the release only so often; if they wait
 * after a release, for their turn, nothing is held unless `again`. */
int pg_hold_operations(struct pg_arena *a, int64_t after_ns, int64_t upto_ns, int again);
void pg_release_operations(struct pg_arena *a);
/* When pg_advance has to be called next; <= now = at once, INT64_MAX = nothing armed. */
int64_t pg_next_ns(const struct pg_arena *a);

/* ---- commands (messages.c) ---------------------------------------------------------- */

enum pg_handled {
    PG_H_REPLY,                   /* *reply_bytes of reply are to be sent */
    PG_H_AGAIN,                   /* bounded work is used up: call again with the same message */
    PG_H_SILENT,                  /* nothing is to be sent */
    PG_H_WAIT                     /* a batch for a later virtual time: advance to *wait_ns, call
                                     again */
};
/* Decodes, validates and applies one command-socket message. Never fails: whatever the
 * bytes are, the reply says so. `reply` has PG_MESSAGE_MAX bytes. uid and pid are the
 * sender's, from the kernel. received_boot_ns, when it was taken from the socket, and
 * real_boot_ns, now, are CLOCK_BOOTTIME also under the virtual clock. */
int pg_handle(struct pg_arena *a, const void *message, uint64_t message_bytes, uint32_t uid,
              uint32_t pid, int64_t received_boot_ns, int64_t real_boot_ns, void *reply,
              uint64_t *reply_bytes, int64_t *wait_ns);
/* For the WAL: answers to `count` batches of a session, from `sequence` on, are with the
 * socket. The first was there at built_boot_ns, the last was taken at handed_boot_ns. */
void pg_replied(struct pg_arena *a, uint64_t session, uint64_t sequence, uint32_t count,
                int64_t built_boot_ns, int64_t handed_boot_ns);

/* ---- owners and quotas (quotas.c, messages.c) ---------------------------------------------- */

/* Quotas of every uid, from now on: timers, blob bytes, operations per second; 0 = none. */
void pg_set_quotas(struct pg_arena *a, uint64_t timers, uint64_t bytes, uint64_t ops);
/* How many per cent of the topics, namespaces, sessions, watch keys and watch records one uid may
 * hold, from now on: all uids but root and own_uid. 0 or 100 = no limit. What stands stays. */
void pg_set_uid_share(struct pg_arena *a, uint32_t percent, uint32_t own_uid);
/* The body of a NAMESPACE message of this uid. Returns enum pg_error with its figures in `detail`;
 * *now = the settings as they stand. */
int pg_set_namespace(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
                     struct pg_namespace_set *now, uint64_t detail[2]);

/* ---- bulk loads (bulk_loads.c, messages.c) ------------------------------------------------- */

/* The body of a BULK_LOAD message from an administrator, who may ask for STATUS and FORGET of any
 * bulk load. Returns enum pg_error with its figures in `detail`, else writes struct
 * pg_bulk_load_info and its parts to `out`, of PG_MESSAGE_MAX bytes. */
int pg_bulk_load_admin(struct pg_arena *a, const void *body, uint64_t bytes, void *out,
                       uint64_t *out_bytes, uint64_t detail[2]);
/* Forgets bulk loads that were last used more than ttl_ns ago, one at most. */
void pg_bulk_loads_sweep(struct pg_arena *a, int64_t real_boot_ns, int64_t ttl_ns);

/* ---- notices without a timer (publish.c) ----------------------------------------------------- */

/* The body of a PUBLISH message of `uid`. Returns enum pg_error with its figures in `detail`;
 * *result = the answer. */
int pg_publish(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
               int64_t real_boot_ns, struct pg_result *result, uint64_t detail[2]);

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
/* With the times, on the real clock, at which the messages were there and the socket had them. */
void pg_published(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns,
                  int64_t handed_boot_ns);
/* Tail heartbeats of topics that changed since `since_boot_ns`, from row *cursor on. */
uint32_t pg_tail_heartbeats(struct pg_arena *a, int64_t since_boot_ns, uint32_t *cursor, void *out,
                            uint64_t out_bytes, struct pg_part *parts, uint32_t parts_max);

/* ---- inboxes (inbox.c) ----------------------------------------------------------------- */

/* The next OUTCOMES message for some session that has something unsent; returns its bytes
 * and names the session, 0 = nothing. `out` is aligned to 8 bytes. */
uint64_t pg_inbox(struct pg_arena *a, uint64_t *session, void *out, uint64_t out_bytes);
/* Sends everything again of each session that acknowledged nothing for a second, for two seconds
 * after the first repetition, and so on up to 64 seconds. */
void pg_inbox_again(struct pg_arena *a, int64_t real_boot_ns);
/* The session's owner is there, perhaps in another place: it gets what it has not acknowledged. */
void pg_inbox_to(struct pg_arena *a, uint64_t session);
/* Nobody is there to send the session's inbox to, until it sends a message. */
void pg_inbox_away(struct pg_arena *a, uint64_t session);

/* ---- sessions (session.c) --------------------------------------------------------------- */

/* How long the session outlives its client; -1: there is no such session. */
int64_t pg_session_grace_ns(const struct pg_arena *a, uint64_t session);
/* Ends a session whose client is gone: its replies and outcomes are freed, its armed operations go
 * on. 1 if there is no such session any more; 0: the WAL buffer is full, ask again. */
int pg_session_end(struct pg_arena *a, uint64_t session, int64_t real_boot_ns);
/* Writes what is known of the sessions of a uid, PG_NIL = of all, as far as there is space, and
 * returns how many of struct pg_session_info these are. */
uint32_t pg_sessions(const struct pg_arena *a, uint32_t uid, struct pg_session_info *out,
                     uint32_t out_count);
/* Frees watermarks past their time to live, `budget` rows from *cursor on. */
void pg_sweep(struct pg_arena *a, int64_t real_boot_ns, uint32_t *cursor, uint32_t budget);

/* ---- readers (scan.c): safe on a live arena ------------------------------------------ */

struct pg_fill { uint32_t used, rows; };
/* Rows of a table of names. Those of reserved namespaces are in neither figure: they are not for
 * timers. */
struct pg_fill pg_namespace_fill(const struct pg_arena *a);
struct pg_fill pg_topic_fill(const struct pg_arena *a);
/* Row of a topic, or PG_NIL. */
uint32_t pg_find_namespace(const struct pg_arena *a, const char *name, uint32_t len);
uint32_t pg_find_topic(const struct pg_arena *a, uint32_t namespace_row, const char *name,
                       uint32_t len);
/* Armed timers from slot *cursor on, as struct pg_info with names, key and payload.
 * Returns bytes written; *cursor = capacity + 1 at the end. */
uint64_t pg_scan(const struct pg_arena *a, uint32_t *cursor, uint32_t max, void *out,
                 uint64_t out_bytes);
/* Parked timers that are due already, counted one by one. */
uint64_t pg_overdue(const struct pg_arena *a);
/* Slots that are not free, counted one by one. */
void pg_slots_in_use(const struct pg_arena *a, uint64_t *timers, uint64_t *operations);
/* When the operation in a slot ended, on the arena's clock; INT64_MIN = none that ended is in
 * it. */
int64_t pg_outcome_ended_ns(const struct pg_arena *a, uint32_t slot);
/* Notices first..last of a topic as one body, oldest first, as many as fit. `positions`
 * has space for last - first + 1. *lost = highest sequence of the range that is gone
 * (first - 1 = none), *got = highest sequence in the body. */
uint64_t pg_replay(const struct pg_arena *a, uint32_t topic, uint64_t first, uint64_t last,
                   uint64_t *positions, void *out, uint64_t out_bytes, uint64_t *lost,
                   uint64_t *got);
const struct pg_header *pg_header_of(const struct pg_arena *a);
const struct pg_metrics *pg_metrics_of(const struct pg_arena *a);
const struct pg_histogram *pg_histograms_of(const struct pg_arena *a);   /* PG_HISTOGRAMS */
void pg_set_state(struct pg_arena *a, uint32_t state, uint32_t pid);
void pg_set_placement(struct pg_arena *a, const struct pg_placement *placement);
/* enum pg_daemon_state, and enum pg_degraded added up; since_boot_ns is CLOCK_BOOTTIME. */
void pg_set_daemon_state(struct pg_arena *a, uint32_t state, uint32_t why, int64_t since_boot_ns);
/* 1: from now on nothing is armed: PUT and WATCH get PG_ST_STOPPING; 0: no more. */
void pg_drain(struct pg_arena *a, int draining);
/* While the arena files have lost their names, PUT, WATCH and UNPARK are refused as PG_ST_ARENA. */
void pg_set_nameless(struct pg_arena *a, int nameless);
/* The handle of the same bytes at other addresses. No call is under way, and no group commit. */
void pg_move(struct pg_arena *a, void *arena, void *secret);
/* From now on namespaces are born by pg_set_namespace alone: messages that name another one get
 * PG_ERR_WRONG_SHARD, and a notice of one PG_ST_WRONG_SHARD. */
void pg_confine(struct pg_arena *a);
/* Nothing is armed, no outcome waits for its acknowledgement, and the socket has all notices. */
int pg_drained(const struct pg_arena *a);
void pg_start_epoch(struct pg_arena *a, const uint8_t boot_id[16]);
void pg_heartbeat(struct pg_arena *a, int64_t real_boot_ns, uint64_t iterations, uint64_t wakeups,
                  uint64_t sent, uint64_t log_dropped);
/* The daemon got further, though its loop does not iterate: in its start, or in its end. */
void pg_progress(struct pg_arena *a, int64_t real_boot_ns);

/* ---- how long things take (metrics.c) --------------------------------------------------- */

/* Counts a span that the core cannot know, into one of enum pg_histogram_id. */
void pg_measure(struct pg_arena *a, uint32_t histogram, int64_t ns);
/* Counts a record with this status, if that refuses; returns whether it does. */
int pg_refused(struct pg_arena *a, uint32_t status);
/* The last pg_handle returned at ended_boot_ns. To be called before the next one. */
void pg_served(struct pg_arena *a, int64_t ended_boot_ns);
/* The message of the last pg_inbox was there at built_boot_ns, and the socket had it at
 * handed_boot_ns. To be called before anything else, and only if it was sent. */
void pg_notified(struct pg_arena *a, int64_t built_boot_ns, int64_t handed_boot_ns);
/* It was not sent: from now on its outcomes wait for their owner. To be called instead. */
void pg_untaken(struct pg_arena *a);
/* Appends a METRICS record, if there is a WAL that has space for it. */
void pg_wal_append_metrics(struct pg_arena *a, int64_t real_boot_ns);

/* ---- the WAL buffer (wal_buffer.c) --------------------------------------------------- */

/* NULL: an arena without a WAL. The group-commit thread's fields are its own; all others read. */
struct pg_wal_buffer *pg_wal_buffer_of(const struct pg_arena *a);
/* What ends timers waits for space in the WAL buffer: it goes on once `committed` has moved. */
int pg_wal_buffer_full(const struct pg_arena *a);
/* The frame that has to be on disk before the reply of the last pg_handle may be sent;
 * 0 = it need not wait. */
uint64_t pg_durable_lsn(const struct pg_arena *a);
/* Copies whole frames from position `from` of the ring up to the tail, as many as fit,
 * without paddings, crc and salt 0. Returns the bytes; *upto = the position behind them,
 * *lsn = number of the last one (unchanged when there is none). out_bytes is PG_WAL_FRAME_MAX
 * at least. Safe while the daemon runs, from its group-commit thread. */
uint64_t pg_wal_buffer_copy(const struct pg_arena *a, uint64_t from, void *out, uint64_t out_bytes,
                            uint64_t *upto, uint64_t *lsn);

/* ---- snapshots (snapshot.c): from a reader of a live arena ------------------------------ */

struct pg_snapshot {              /* zeros at the start, but for `quiet` */
    uint32_t quiet;               /* 1: nobody changes the arena meanwhile, so that the snapshot is
                                     whole without any WAL */
    uint32_t done;                /* 1: LAST was written */
    uint64_t phase;
    uint64_t next, end;           /* within the phase */
    uint64_t frames;
    uint64_t start_lsn;           /* the WAL is to be redone over it from here */
    uint64_t end_lsn;             /* once done: it is valid when the WAL holds this frame */
};
/* The next whole frames of all authoritative state but sessions, not sealed; their numbers count
 * from 1. Returns bytes written; call until `done`. out_bytes is PG_WAL_FRAME_MAX at least. The
 * arena may change meanwhile: what changed after start_lsn is in the WAL. */
uint64_t pg_snapshot(const struct pg_arena *a, struct pg_snapshot *s, void *out,
                     uint64_t out_bytes);

/* ---- the WAL's files (wal_segment.c, crc32c.c) -------------------------------------------- */

/* CRC-32C of what came before, whose own is `crc` (nothing: 0), and of these bytes. */
uint32_t pg_crc32c(uint32_t crc, const void *bytes, uint64_t count);

/* Where a walk stands: in the middle; or behind the last whole group, with its reason. */
enum pg_walk_state {
    PG_WALK_NONE,                 /* nothing was read yet */
    PG_WALK_GROUPS,               /* there may be another group */
    PG_WALK_SEALED,               /* the segment is complete; the next one goes on */
    PG_WALK_END,                  /* only zeros follow */
    PG_WALK_TORN,                 /* parts of the newest group follow: it was not committed */
    PG_WALK_DAMAGED               /* what followed was committed and is lost */
};

/* Reads segments in order, each whole in memory and aligned to 8 bytes; zeros at the start. */
struct pg_walk {
    struct pg_wal_segment header; /* of the segment that is being read */
    const uint8_t *bytes;
    uint64_t size;
    uint64_t at;                  /* byte behind the last whole group */
    uint64_t next;                /* byte of the frame that comes next; at most `at` */
    uint64_t lsn;                 /* of the last frame of the last whole group */
    uint64_t group;               /* its number */
    int64_t boot_ns;              /* its clocks, or the header's */
    int64_t wall_ns;
    uint64_t bad_from;            /* TORN, DAMAGED: bytes that are not as they were written */
    uint64_t bad_to;
    uint64_t lost_from;           /* DAMAGED: LSNs that are lost ... */
    uint64_t lost_to;             /* ... this one too; lost_from - 1: none */
    uint32_t state;               /* enum pg_walk_state */
    uint32_t reserved;
};

/* Takes the next file. Refuses what is no segment, or of another arena; and one that does not go
 * on where the walk has ended: then the walk is DAMAGED. */
int pg_walk_segment(struct pg_walk *w, const void *bytes, uint64_t size, struct pg_fault *why);
/* The next frame of a whole group, GROUP and SEAL left out. NULL: w->state says why. */
const struct pg_frame_head *pg_walk_next(struct pg_walk *w);
/* Continues a DAMAGED walk at the next group or SEAL of the file, if all records that are lost in
 * between come before live_lsn. 0: the walk stays as it is. */
int pg_walk_skip(struct pg_walk *w, uint64_t live_lsn);
/* Makes the first PG_WAL_SEGMENT_HEAD bytes of a file; major, minor and crc are filled in. */
void pg_wal_segment_begin(void *block, const struct pg_wal_segment *fields);
/* Seals the frames that stand behind PG_GROUP_HEAD bytes of space for the GROUP frame; together
 * `bytes`. Of the fields, `bytes` is filled in. */
void pg_group_seal(void *group, uint64_t bytes, uint32_t salt, const struct pg_wal_group *fields);
/* The SEAL frame, behind the last group of a file; its number, and the LSN of its last frame. */
void pg_wal_segment_end(struct pg_frame_head *seal, uint32_t salt, uint64_t group, uint64_t lsn);

/* What a frame of a known type tells of its timer's beginning, and of the timer's that it replaces
 * (else NULL). NULL: it has none, as in exports of arenas without a WAL. The frame is one that a
 * walk gave. */
const struct pg_timestamps *pg_frame_timestamps(const struct pg_frame_head *frame,
                                                const struct pg_timestamps **replaced);
/* What it tells of who asked for the end of a timer. NULL: it has none. */
const struct pg_asked *pg_frame_asked(const struct pg_frame_head *frame);

/* ---- columns (columns.c): records as the columns of a table ------------------------------- */

/* The names of columns are the table's, in lower case. Those of strings hold numbers, which
 * index words: kind a record's type (0 = unknown), namespace and topic a row, the others what
 * layout.h says. Of what a record does not have, a column has no value. */
enum pg_long_column {
    PG_LC_LSN, PG_LC_AT,          /* microseconds, UTC */
    PG_LC_AT_NS, PG_LC_TICKET, PG_LC_DEADLINE_NS, PG_LC_WALL_DEADLINE_NS, PG_LC_SENT_NS,
    PG_LC_RECEIVED_NS, PG_LC_APPLIED_NS, PG_LC_ARMED_NS, PG_LC_ADD_LSN, PG_LC_SESSION,
    PG_LC_ENDED_BOOT_NS, PG_LC_SEQUENCE, PG_LC_POSITION, PG_LC_REPLACED, PG_LC_THRESHOLD,
    PG_LC_WATERMARK, PG_LC_POSITIONS_FROM, PG_LC_POSITIONS_UPTO, PG_LC_BUILT_NS, PG_LC_HANDED_NS,
    PG_LC_BULK_LOAD_ROW, PG_LC_PAYLOAD_BYTES,
    PG_LC_REPLACED_ADD_LSN, PG_LC_REPLACED_SESSION, PG_LC_REPLACED_SENT_NS,
    PG_LC_REPLACED_RECEIVED_NS, PG_LC_REPLACED_APPLIED_NS, PG_LC_REPLACED_ARMED_NS,
    PG_LC_REPLACED_DEADLINE_NS, PG_LC_ENDED_BY, PG_LC_ENDED_BATCH,
    PG_LC_DONE_NS, PG_LC_REPLACED_DONE_NS,
    PG_LONG_COLUMNS
};
enum pg_int_column {
    PG_IC_KIND, PG_IC_CLOCK, PG_IC_NAMESPACE, PG_IC_TOPIC, PG_IC_KEY_TYPE, PG_IC_PAYLOAD_LEN,
    PG_IC_UID, PG_IC_SLOT, PG_IC_CAUSE, PG_IC_ERROR, PG_IC_FLAGS, PG_IC_CONDITION, PG_IC_ROW,
    PG_IC_COUNT, PG_IC_PARKED, PG_IC_BULK_LOADED, PG_IC_REPLACED_BULK_LOADED, PG_INT_COLUMNS
};
enum pg_bytes_column { PG_BC_KEY, PG_BC_PAYLOAD, PG_BC_MISSING, PG_BC_BULK_LOAD, PG_BC_NAME,
                       PG_BYTES_COLUMNS };  /* NAME: of a namespace, topic or worker */
enum pg_cause_column { PG_CAUSE_ACKNOWLEDGED = 6, PG_CAUSE_DROPPED };  /* behind enum pg_cause: of an
                                                                           END */

/* Bit n of `valid`: row n has a value; `count`: how many have. */
struct pg_longs { int64_t *values; uint8_t *valid; uint32_t count; };
struct pg_ints { int32_t *values; uint8_t *valid; uint32_t count; };
struct pg_bytes { int32_t *offsets; uint8_t *bytes, *valid; uint32_t count, used; };
struct pg_watch_lists {
    int32_t *offsets, *row, *flags;
    int64_t *target, *base, *cap;
    uint8_t *valid;
    uint32_t count, used;
};

/* The caller's memory: `capacity` rows, offsets of one more; `bytes_max` of each column of
 * bytes, a 32nd as many watch keys. At the start bits and offsets[0] are zeros. */
struct pg_columns {
    uint32_t rows;
    uint32_t capacity;
    uint32_t bytes_max;           /* PG_WAL_FRAME_MAX at least */
    uint32_t payloads;            /* 0: they are left out */
    uint64_t kinds[32];           /* records of each type; 0: of those that are not known */
    struct pg_longs longs[35];
    struct pg_ints ints[17];
    struct pg_bytes bytes[5];
    struct pg_watch_lists watch;
};

/* What rows of the arena's tables are called, learnt on the way; PG_NIL at the start, and
 * carried from file to file. */
struct pg_births {
    uint32_t namespaces[65536];   /* its own row once it has a name */
    uint32_t topics[65536];       /* the row of its namespace */
};

/* Appends records until the columns are full, or the walk gives no more: then 0. */
int pg_columns_fill(struct pg_columns *c, struct pg_births *births, struct pg_walk *walk);
/* The same with records that name something alone, in order to learn the names. */
int pg_columns_names(struct pg_columns *c, struct pg_births *births, struct pg_walk *walk);

/* ---- redo (redo.c): frames into a fresh arena ---------------------------------------------- */

struct pg_redo {                  /* zeros at the start */
    uint64_t frames;              /* of the snapshot, read so far */
    uint64_t next_lsn;            /* of the WAL, once the snapshot was read; 0 before */
    uint64_t end_lsn;             /* of the snapshot: what was redone is whole once next_lsn is
                                     past it */
};
/* What the arena has to be created with, from a snapshot's first frame. Left as they are,
 * for the caller: layout_id, secret, sessions, page_size, stream_id, boot_id. */
int pg_redo_config(const void *frame, uint64_t bytes, struct pg_config *config,
                   struct pg_fault *why);
/* Applies a buffer of whole frames, aligned to 8 bytes: first all of the snapshot, then the
 * WAL's from its start LSN on (older ones are skipped). Redoing them twice changes nothing.
 * Refuses what names anything that is not there, a hole in the numbers, and what has no space:
 * a snapshot is of several moments, so the sum of what it has may need a larger arena, and
 * pg_migrate afterwards. `where` is the number of the frame. */
int pg_redo(struct pg_arena *a, struct pg_redo *r, const void *frames, uint64_t bytes,
            struct pg_fault *why);
/* The same with the frames of the file that a walk is in, until it gives no more. */
int pg_redo_file(struct pg_arena *a, struct pg_redo *r, struct pg_walk *walk,
                 struct pg_fault *why);
/* After the last frame: adds shift_ns to all times on the arena's clock, counts tickets
 * past those that a power cut may have lost; a rebuild must follow. shift_ns = wall offset then -
 * wall offset now (of the boot clocks) when the boot id differs, else 0. */
int pg_redo_end(struct pg_arena *a, const struct pg_redo *r, int64_t real_boot_ns,
                int64_t shift_ns, int64_t wall_offset_ns, struct pg_fault *why);

/* ---- group commit (group_commit.c): from the WAL buffer to disk ---------------------------- */

/* The system calls of the group-commit thread; each returns what the call of that name does, and
 * sets errno. For tests, which give their own. */
struct pg_storage {
    void *context;
    int (*open)(void *context, int directory, const char *name, int flags); /* directory -1: none */
    int64_t (*pwrite)(void *context, int file, const void *bytes, uint64_t count, uint64_t at);
    int (*fallocate)(void *context, int file, uint64_t bytes);
    int (*fdatasync)(void *context, int file);
    int (*rename)(void *context, int directory, const char *from, const char *to);
    int (*fsync_dir)(void *context, int directory);
    int (*close)(void *context, int file);
    int64_t (*clock_ns)(void *context);                  /* monotonic; measures syncs */
};

struct pg_group_commit;
uint64_t pg_group_commit_bytes(void);
/* Ends the segment in which `end` has ended, a walk that has read the newest one of `directory` to
 * its end, and begins the next (NONE: a new WAL, behind its lsn and group). The walk's bytes are
 * still there: those behind committed_lsn are written again. All that was appended is on disk when
 * it returns. wal_segment_bytes: of new segments, a multiple of PG_WAL_SEGMENT_HEAD,
 * PG_WAL_SEGMENT_MIN at least. storage NULL: the system's. After a refusal nothing is open; a call
 * that failed is named in `why`, `where` is the LSN and `found` its errno. */
int pg_group_commit_open(struct pg_group_commit *c, struct pg_arena *a, const char *directory,
                         uint64_t wal_segment_bytes, const struct pg_walk *end,
                         const struct pg_storage *storage, struct pg_fault *why);
/* Commits one group of what was appended; 0 = nothing was. The thread does nothing else. */
int pg_group_commit_iterate(struct pg_group_commit *c);
int pg_group_commit_start(struct pg_group_commit *c, struct pg_fault *why);    /* the thread */
/* To be called after something was appended; cheap while the thread is busy. */
void pg_group_commit_kick(struct pg_group_commit *c);
/* An eventfd: readable once committed_lsn has moved, or the state is PG_WAL_STOPPED. */
int pg_group_commit_fd(const struct pg_group_commit *c);
/* Stops the thread's work on arena and files. 0: not yet; ask again once the eventfd is readable.
 * The arena may move before the thread goes on. */
int pg_group_commit_pause(struct pg_group_commit *c);
void pg_group_commit_unpause(struct pg_group_commit *c);
/* Ends the thread, which does not pause, after it has committed all that was appended. */
void pg_group_commit_stop(struct pg_group_commit *c);
void pg_group_commit_close(struct pg_group_commit *c);                         /* the files */

/* ---- where memory is (memory.c): system calls, without an arena ---------------------------- */

#define PG_NODES_MAX 1024             /* numbers of NUMA nodes are below */
#define PG_MEMORY_SAMPLES 128

/* They return 0 or an errno; ENOSYS: this kernel knows no nodes. */

/* This thread, and those that it starts, get memory from that node while it has any. Memory that
 * was touched before stays where it is. */
int pg_memory_prefer(uint32_t node);
/* The same for this memory, whoever touches it; whole pages. move: what is elsewhere comes over,
 * as far as the kernel can. */
int pg_memory_bind(void *memory, uint64_t bytes, uint32_t node, int move);
/* *elsewhere = how many of PG_MEMORY_SAMPLES pages, evenly spread, are not on that node. */
int pg_memory_elsewhere(const void *memory, uint64_t bytes, uint32_t node, uint32_t *elsewhere);
/* All that is mapped now stays in RAM. */
int pg_memory_lock(void);

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
