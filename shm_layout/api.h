/* api.h - the functions of the core that Python calls. cffi parses this file, so it has no include
 * guard, no include and no inline function. layout.h has to come before it. A handle belongs to one
 * process, and to one thread at a time. A function that returns int returns 1 for "yes" or "done"
 * and 0 for "no", unless its comment says otherwise. */

struct pg_fault {                 /* the first broken invariant, or the reason for a refusal */
    char part[16];                /* part of the core that found the fault */
    char detail[96];              /* the invariant or the limit, in words */
    uint64_t where;               /* row, slot, position, LSN or offset of the fault */
    uint64_t expected;            /* expected value, or the limit */
    uint64_t found;               /* value found */
};

struct pg_config {                /* settings of a new arena */
    uint64_t layout_id;
    uint64_t payload_bytes;       /* size of the payload memory in bytes, rounded up to granules */
    uint64_t replay_bytes_max;
    int64_t tick_ns;
    int64_t now_ns;
    int64_t wall_offset_ns;
    int64_t created_wall_ns;
    int64_t wall_origin_ns;
    uint64_t stream_id;           /* identity of the notice streams; not 0 */
    uint64_t secret[2];
    uint8_t uuid[16];
    uint8_t boot_id[16];
    uint32_t capacity;
    uint32_t replay_capacity;     /* number of entries of the replay buffer, a power of two */
    uint32_t fanout;
    uint32_t namespaces;
    uint32_t topics;
    uint32_t sessions;
    uint32_t watches;             /* number of watch records; an operation uses one record per
                                     key */
    uint32_t watermarks;          /* watch keys */
    uint32_t accounts;            /* maximum number of uids that have sessions, timers or watch
                                     keys */
    uint32_t bulk_loads;          /* number of bulk loads that the arena can remember; 0 = none */
    uint32_t bulk_load_blocks;    /* number of blocks of PG_BULK_LOAD_BLOCK_ROWS rows, shared by all
                                     bulk loads */
    uint32_t groups;              /* number of consumer groups; 0 = none */
    uint32_t jobs;                /* number of jobs of all consumer groups together, and of pending
                                     timers that will become jobs */
    uint32_t schedules;           /* number of schedules that the arena can have; 0 = none */
    uint32_t cursors;             /* number of rows for cursors and their positions; 0 = none */
    uint32_t pad;
    uint64_t watermark_ttl_ns;
    uint64_t inbox_max;
    uint64_t wal_buffer_bytes;    /* size of the WAL buffer's ring in bytes, a power of two; 0 = no
                                     WAL */
    uint32_t page_size;
    uint32_t clock_kind;
    uint32_t shard;
    uint32_t shards;              /* number of shards in the deployment; 0 and 1 = no deployment */
};

struct pg_arena;                  /* handle of a process; the caller provides memory of
                                     pg_handle_bytes() bytes */

/* ---- lifecycle of an arena (arena.c, migrate.c) --------------------------------------- */

uint64_t pg_handle_bytes(void);
/* Return the size of the arena file, or of the private arena file, in bytes; 0 = a setting is out
 * of bounds. */
uint64_t pg_arena_bytes(const struct pg_config *config);
uint64_t pg_private_bytes(const struct pg_config *config);
/* Create an arena. `arena` and `secret` must be zeroed memory of at least the sizes that
 * pg_arena_bytes and pg_private_bytes return. */
int pg_create(struct pg_arena *a, void *arena, void *secret, const struct pg_config *config);
/* Attach to an arena; secret = NULL attaches as a reader. Refuses an arena of another format, size
 * or layout; `why` then has the expected value and the value found. */
int pg_attach(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
              uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why);
/* Attach to an arena of an earlier minor ABI version, whose layout id is `layout_id`. Only
 * pg_convert may use the handle. */
int pg_attach_previous(struct pg_arena *a, void *arena, uint64_t arena_bytes, void *secret,
                       uint64_t secret_bytes, uint64_t layout_id, struct pg_fault *why);
/* Rebuild all derived state; required after pg_attach, before any change. now_ns is on the arena's
 * clock. Notices that were not handed to the socket yet stay in the replay buffer. */
int pg_rebuild(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
/* Do what pg_rebuild does, with a second thread if the machine has a free CPU. */
int pg_rebuild_threaded(struct pg_arena *a, int64_t now_ns, struct pg_fault *why);
/* Copy all authoritative state of `from` into the fresh arena `to`, which has other sizes. Tickets,
 * sequences, sessions and LSNs are preserved. Refuses if `to` lacks space; `why` then has the
 * required and the available size. Slots and rows get other numbers. So a snapshot and frames
 * cannot be redone together if one is from before the migration and the other is from after it. */
int pg_migrate(struct pg_arena *to, const struct pg_arena *from, struct pg_fault *why);
/* Copy all authoritative state of `from`, an arena of an earlier minor ABI version, unchanged into
 * the fresh arena `to` of the same sizes; pg_rebuild must follow. Refuses if a size differs; `why`
 * then has the two sizes. If a kill left a frame of `from` in doubt, a successful call also keeps
 * or drops this frame in `from`. All frames that `from` has appended are then sound and may be
 * committed to the WAL of `from`. */
int pg_convert(struct pg_arena *to, struct pg_arena *from, struct pg_fault *why);
/* Check all invariants. If one is broken, returns 0 and puts the first broken invariant into
 * `fault`. */
int pg_check(struct pg_arena *a, struct pg_fault *fault);
/* Check only the invariants that a reader can check while the daemon changes the arena. */
int pg_check_live(const struct pg_arena *a, struct pg_fault *fault);

/* ---- shards (merge.c, namespace_stats.c) -------------------------------------------------- */

/* Return the number of the partition of a key: CRC-32C of its bytes modulo `partitions`. */
uint32_t pg_partition(const void *key, uint64_t bytes, uint32_t partitions);

struct pg_route {                 /* the shards that hold a namespace */
    const uint32_t *shards;       /* number of the shard of each partition of the namespace's
                                     keys */
    uint32_t partitions;          /* 0 = no shard holds the namespace */
    uint32_t fresh_topics;        /* 1 = the namespace comes from several arenas or goes to several
                                     arenas. Its topics then start new sequences, and of the
                                     notices that were sent only those are copied that a cursor has
                                     not committed */
};
struct pg_source {                /* a source arena, which is attached with its private arena file
                                     and rebuilt */
    const struct pg_arena *arena;
    const struct pg_route *routes;            /* one route for each row of its namespace table */
    uint32_t *namespaces, *topics, *watermarks, *sessions, *bulk_loads, *schedules, *cursors;
                                  /* scratch memory, one element per row */
    uint64_t next;                /* scratch memory */
};
/* Copy the state that belongs to the shard of the fresh arena `to` from all source arenas;
 * pg_rebuild must follow. Tickets are preserved, and new tickets in `to` start after the highest
 * ticket of all sources. Therefore all arenas of a deployment have to be among the sources, even an
 * arena that contributes nothing. A session keeps its nonce and its replies, but gets another id.
 * Counters begin at 0. Refuses if `to` lacks space; `why` then has the required and the available
 * size. */
int pg_merge(struct pg_arena *to, struct pg_source *sources, uint32_t count,
             struct pg_fault *why);

struct pg_namespace_stats {       /* statistics of a namespace in one arena */
    uint64_t timers, parked, operations, outcomes, watermarks;
    uint64_t notices;             /* unsent notices */
    uint64_t bulk_loads;
    uint64_t schedules;
    uint64_t topics;
    uint64_t jobs;                /* jobs of consumer groups, dead letters included */
    uint64_t digest;              /* digest of everything that the fields `timers` to `notices` and
                                     `jobs` count; the sum over the arenas of a deployment does not depend
                                     on the sharding */
    uint64_t settings;            /* digest of the namespace's settings */
    uint64_t streams;             /* digest of the namespace's topics and bulk loads */
};
/* Fill one row of statistics per namespace. Nobody may change the arena during the call. Refuses if
 * the namespace of an outcome cannot be determined. */
int pg_namespace_stats(const struct pg_arena *a, struct pg_namespace_stats *rows,
                       struct pg_fault *why);

/* ---- time (timers.c) --------------------------------------------------------------- */

/* Fire due timers and expire due operations. Returns the number of timers fired or moved, at most
 * `budget`. *more = 1 if due work is left, because the budget is used up or the replay buffer waits
 * for pg_published. wall_offset_ns is the current wall time minus the time of the arena's clock.
 * After a step of the wall clock, several bounded calls move the timers with wall deadlines to
 * their new places. */
uint32_t pg_advance(struct pg_arena *a, int64_t now_ns, int64_t wall_offset_ns,
                    int64_t real_boot_ns, uint32_t budget, int *more);
/* Delay the expiry of operations after an outage of the caller that lasted from `after_ns` to
 * `upto_ns` on the arena's clock. These operations do not expire before pg_release_operations, so
 * that triggers that were sent in time are applied first. Operations that were due by `after_ns`
 * are not delayed; nor are operations that were armed after `upto_ns` and come due after `upto_ns`.
 * Timers fire as always. Another outage before the release extends the delay.
 *
 * Returns 0 if operations that an earlier call delayed have not expired yet; the caller must then
 * limit how often it defers the release. If the delayed operations have been released but have not
 * expired yet, this call delays nothing unless `again` is set. */
int pg_hold_operations(struct pg_arena *a, int64_t after_ns, int64_t upto_ns, int again);
void pg_release_operations(struct pg_arena *a);
/* Return the time at which pg_advance has to be called next, on the arena's clock. If that time is
 * now or earlier, pg_advance has work at once; INT64_MAX means that nothing is armed. */
int64_t pg_next_ns(const struct pg_arena *a);

/* ---- commands (messages.c) ---------------------------------------------------------- */

enum pg_handled {
    PG_H_REPLY,                   /* send the first *reply_bytes bytes of `reply` */
    PG_H_AGAIN,                   /* the work budget of this call is used up; call again with the
                                     same message */
    PG_H_SILENT,                  /* send nothing */
    PG_H_WAIT                     /* the batch is for a later virtual time: advance to *wait_ns,
                                     then call again */
};
/* Decode, validate and apply one message of the command socket. Never fails: if the bytes are bad,
 * the reply contains the error. Returns enum pg_handled. `reply` has space for PG_MESSAGE_MAX
 * bytes. uid and pid are the sender's, from the kernel. received_boot_ns (when the message was
 * taken from the socket) and real_boot_ns (now) are CLOCK_BOOTTIME even under the virtual clock. */
int pg_handle(struct pg_arena *a, const void *message, uint64_t message_bytes, uint32_t uid,
              uint32_t pid, int64_t received_boot_ns, int64_t real_boot_ns, void *reply,
              uint64_t *reply_bytes, int64_t *wait_ns);
/* Record in the WAL that the socket took the replies to `count` batches of a session; `sequence` is
 * the sequence number of the first of these batches. The first reply was built at built_boot_ns;
 * the socket took the last reply at handed_boot_ns. */
void pg_replied(struct pg_arena *a, uint64_t session, uint64_t sequence, uint32_t count,
                int64_t built_boot_ns, int64_t handed_boot_ns);

/* ---- owners and quotas (quotas.c, messages.c) ---------------------------------------------- */

/* Set the quotas of each uid: number of timers, blob bytes, operations per second; 0 = no quota. */
void pg_set_quotas(struct pg_arena *a, uint64_t timers, uint64_t bytes, uint64_t ops);
/* Set the percentage of topics, namespaces, sessions, watch keys and watch records that one uid may
 * hold; 0 or 100 = no limit. Root and own_uid have no limit. A uid keeps the rows that it already
 * holds. */
void pg_set_uid_share(struct pg_arena *a, uint32_t percent, uint32_t own_uid);
/* Apply the body of a NAMESPACE message from `uid`. Returns an error of enum pg_error, and stores
 * in `detail` the figures that the comment of this error lists; *now = the settings of the
 * namespace after the call. */
int pg_set_namespace(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
                     struct pg_namespace_set *now, uint64_t detail[2]);
/* Apply the body of a TOPIC message from `uid`. Returns an error of enum pg_error, and stores its
 * figures in `detail`; without an error, *result is the answer. */
int pg_set_topic(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
                 struct pg_result *result, uint64_t detail[2]);

/* ---- schedules (schedules.c, schedule_messages.c) ------------------------------------------ */

/* A question to the daemon: the first `count` times of a cron expression after `after_ns` and not
 * after `until_ns`. Its texts are valid until the next call that changes the arena. */
struct pg_question {
    const uint8_t *spec, *zone;
    uint32_t spec_len, zone_len;
    uint32_t count;
    uint32_t row;                 /* row of the schedule that asks; PG_NIL = a message asks */
    uint64_t version;             /* version of the row */
    int64_t after_ns, until_ns;
};
/* Get the next question. Returns 0 if there is none. */
int pg_schedule_question(struct pg_arena *a, struct pg_question *q);
/* Answer the question that pg_schedule_question returned. `status`: DONE, or BAD_SPEC. Fewer times
 * than requested mean that no more follow. */
void pg_schedule_answer(struct pg_arena *a, const struct pg_question *q, uint32_t status,
                        const int64_t *times, uint32_t count);
/* Let all cron expressions be computed again: the rules of a time zone may have changed, or the wall
 * clock was set. Schedules that were put later than the wall clock shows begin at the current
 * time. */
void pg_schedules_recheck(struct pg_arena *a);

/* ---- bulk loads (bulk_loads.c, messages.c) ------------------------------------------------- */

/* Apply the body of a BULK_LOAD message from an administrator, who may use STATUS and FORGET with
 * any bulk load. Returns an error of enum pg_error, and stores in `detail` the figures that the
 * comment of this error lists. Without an error, `out` (PG_MESSAGE_MAX bytes) receives struct
 * pg_bulk_load_info and its parts. */
int pg_bulk_load_admin(struct pg_arena *a, const void *body, uint64_t bytes, void *out,
                       uint64_t *out_bytes, uint64_t detail[2]);
/* Forget at most one bulk load that was last used more than ttl_ns ago. */
void pg_bulk_loads_sweep(struct pg_arena *a, int64_t real_boot_ns, int64_t ttl_ns);

/* ---- cursors (cursors.c) --------------------------------------------------------------------- */

/* Return the position of the oldest notice in the replay buffer that some cursor has not committed;
 * `upto` = none is older. Readers may call this. */
uint64_t pg_cursors_oldest(const struct pg_arena *a, uint64_t upto);

/* ---- notices without a timer (publish.c) ----------------------------------------------------- */

/* Apply the body of a PUBLISH message from `uid`. Returns an error of enum pg_error, and stores in
 * `detail` the figures that the comment of this error lists. *result = the answer to the
 * message. */
int pg_publish(struct pg_arena *a, const void *body, uint64_t bytes, uint32_t uid,
               int64_t real_boot_ns, struct pg_result *result, uint64_t detail[2]);

/* A timer that is put without a message: for tests, imports and use inside one process. */
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
    uint8_t slack;                /* as pg_record.flags of a PUT */
    int64_t time_ns;
};
/* Apply one request without a session. Only tests call these functions; the daemon applies records
 * with pg_handle. */
void pg_put(struct pg_arena *a, const struct pg_put *put, struct pg_result *result);
void pg_cancel(struct pg_arena *a, const struct pg_put *key, uint64_t ticket,
               struct pg_result *result);
/* Look up one timer and write a struct pg_info with names, key and payload. Returns the number of
 * bytes written. */
uint64_t pg_get(struct pg_arena *a, const struct pg_put *key, void *out, uint64_t out_bytes);

/* ---- notices (notices.c) ----------------------------------------------------------- */

/* Make all fired timers visible to readers, and wake the readers that sleep on the words of their
 * topics and namespaces. Each word is woken at most once. */
void pg_show(struct pg_arena *a);
/* Return the position up to which notices may be marked as sent if no socket wants them. */
uint64_t pg_sendable(const struct pg_arena *a);

struct pg_part {                  /* one message inside an output buffer */
    uint64_t subject;             /* offset of the message's first frame */
    uint64_t body;                /* offset of the message's second frame */
    uint32_t subject_bytes;
    uint32_t body_bytes;
};
/* Write messages with the replay buffer entries that were not handed to the socket yet, one message
 * per topic, in order. Returns the number of messages; *upto = position to pass to pg_published
 * when all messages have been sent. */
uint32_t pg_notices(struct pg_arena *a, void *out, uint64_t out_bytes, struct pg_part *parts,
                    uint32_t parts_max, uint64_t *upto);
/* Mark the replay buffer entries below position `upto` as sent. Their messages were built at
 * built_boot_ns, and the socket took the messages at handed_boot_ns, both on the real clock. */
void pg_published(struct pg_arena *a, uint64_t upto, int64_t built_boot_ns,
                  int64_t handed_boot_ns);
/* Write tail heartbeats for topics that changed since `since_boot_ns`, starting at row *cursor of
 * the topic table. Returns the number of messages. */
uint32_t pg_tail_heartbeats(struct pg_arena *a, int64_t since_boot_ns, uint32_t *cursor, void *out,
                            uint64_t out_bytes, struct pg_part *parts, uint32_t parts_max);

/* ---- inboxes (inbox.c) ----------------------------------------------------------------- */

/* Write the next OUTCOMES message for a session that has unsent outcomes or CHECKs. Returns the
 * length of the message in bytes and sets *session; 0 = no session has any. `out` is aligned to 8
 * bytes. */
uint64_t pg_inbox(struct pg_arena *a, uint64_t *session, void *out, uint64_t out_bytes);
/* Send the whole inbox again to each session that has acknowledged nothing for a second. The
 * interval doubles with each repetition, up to 64 seconds. */
void pg_inbox_again(struct pg_arena *a, int64_t real_boot_ns);
/* Note that the session's owner is connected, perhaps through a new connection: send it everything
 * that it has not acknowledged. */
void pg_inbox_to(struct pg_arena *a, uint64_t session);
/* Note that no client is connected to receive the session's inbox. This holds until a message of
 * the session arrives. */
void pg_inbox_away(struct pg_arena *a, uint64_t session);
/* Build a JOBS message: leased jobs that were not sent to the member that holds them, or no jobs for
 * a former member of a deleted group. *session is the member's session; 0 = there are none. */
uint64_t pg_jobs(struct pg_arena *a, uint64_t *session, void *out, uint64_t out_bytes);
/* Note that the message of the last pg_jobs was not sent. It is sent again at the next heartbeat. */
void pg_jobs_untaken(struct pg_arena *a);

/* ---- sessions (session.c) --------------------------------------------------------------- */

/* Return the time in ns that the session outlives its client; -1 = there is no such session. */
int64_t pg_session_grace_ns(const struct pg_arena *a, uint64_t session);
/* End a session whose client is gone. Its replies and outcomes are freed; its armed operations stay
 * armed. Returns 1 if the session no longer exists, 0 if the WAL buffer is full: call again
 * later. */
int pg_session_end(struct pg_arena *a, uint64_t session, int64_t real_boot_ns);
/* Write a struct pg_session_info for each session of a uid (PG_NIL = all uids), at most out_count
 * structs. Returns the number of structs written. */
uint32_t pg_sessions(const struct pg_arena *a, uint32_t uid, struct pg_session_info *out,
                     uint32_t out_count);
/* Forget watch keys whose time to live has passed. Looks at `budget` rows, starting at row
 * *cursor. */
void pg_sweep(struct pg_arena *a, int64_t real_boot_ns, uint32_t *cursor, uint32_t budget);

/* ---- readers (scan.c): safe on a live arena ------------------------------------------ */

struct pg_fill { uint32_t used, rows; };
/* Return the number of used rows and of all rows of a table of names. Neither number includes the
 * rows of reserved namespaces, which timers cannot use. */
struct pg_fill pg_namespace_fill(const struct pg_arena *a);
struct pg_fill pg_topic_fill(const struct pg_arena *a);
/* Return the row of a namespace or topic; PG_NIL = it does not exist. */
uint32_t pg_find_namespace(const struct pg_arena *a, const char *name, uint32_t len);
uint32_t pg_find_topic(const struct pg_arena *a, uint32_t namespace_row, const char *name,
                       uint32_t len);
/* Write armed and parked timers and armed operations, starting at slot *cursor, as struct pg_info
 * with names, key and payload. Returns the number of bytes written; *cursor = capacity + 1 when all
 * slots have been written. */
uint64_t pg_scan(const struct pg_arena *a, uint32_t *cursor, uint32_t max, void *out,
                 uint64_t out_bytes);
/* Return the number of parked timers that are already due. Looks at every slot. */
uint64_t pg_overdue(const struct pg_arena *a);
/* Count the slots that timers and operations use. Looks at every slot. */
void pg_slots_in_use(const struct pg_arena *a, uint64_t *timers, uint64_t *operations);
/* Return the time at which the operation in a slot ended, on the arena's clock; INT64_MIN = the
 * slot holds no ended operation. */
int64_t pg_outcome_ended_ns(const struct pg_arena *a, uint32_t slot);
/* Return the sequence of the topic's newest visible notice; 0 = it has none. */
uint64_t pg_newest(const struct pg_arena *a, uint32_t topic);
/* Return the sequence of the topic's newest notice that was handed to the socket. Only for an arena
 * that no daemon writes. */
uint64_t pg_newest_sent(const struct pg_arena *a, uint32_t topic);
struct pg_known_topic {
    uint64_t incarnation;
    uint64_t sequence;            /* newest known sequence; UINT64_MAX = later ones do not matter */
    uint32_t row;
    uint32_t pad;
};
/* Compare topics of a namespace with `known`, which has an element for each row of the topic table:
 * the topics in `rows`, or if that is NULL, all. Write the topics with another incarnation or a
 * newer visible notice to `found`, and return their number. */
uint32_t pg_changed_topics(const struct pg_arena *a, uint32_t namespace_row, const uint32_t *rows,
                           uint32_t row_count, const struct pg_known_topic *known,
                           struct pg_known_topic *found);
/* Write the notices with sequence numbers `first` to `last` of a topic as the body of one message,
 * oldest first, as many as fit. `positions` has space for last - first + 1 elements. *lost =
 * highest sequence number of the range that has left the replay buffer (first - 1 = none), *got =
 * highest sequence number in the body. Returns the number of bytes written. */
uint64_t pg_replay(const struct pg_arena *a, uint32_t topic, uint64_t first, uint64_t last,
                   uint64_t *positions, void *out, uint64_t out_bytes, uint64_t *lost,
                   uint64_t *got);
const struct pg_header *pg_header_of(const struct pg_arena *a);
const struct pg_metrics *pg_metrics_of(const struct pg_arena *a);
const struct pg_histogram *pg_histograms_of(const struct pg_arena *a);   /* an array of
                                                                            PG_HISTOGRAMS */
void pg_set_state(struct pg_arena *a, uint32_t state, uint32_t pid);
void pg_set_placement(struct pg_arena *a, const struct pg_placement *placement);
/* Set the daemon's state (enum pg_daemon_state) and the sum of its reasons (enum pg_degraded);
 * since_boot_ns is CLOCK_BOOTTIME. */
void pg_set_daemon_state(struct pg_arena *a, uint32_t state, uint32_t why, int64_t since_boot_ns);
/* draining = 1: arm nothing, and answer PUT, WATCH and UNPARK with PG_ST_STOPPING. draining = 0:
 * accept them again. */
void pg_drain(struct pg_arena *a, int draining);
/* nameless = 1: the arena files are unlinked, so answer PUT, WATCH and UNPARK with PG_ST_ARENA. */
void pg_set_nameless(struct pg_arena *a, int nameless);
/* Set the addresses at which the handle's two arena files are mapped now. No other call and no
 * group commit may be running. */
void pg_move(struct pg_arena *a, void *arena, void *secret);
/* After this call only pg_set_namespace creates namespaces. Messages that name a namespace that
 * does not exist are refused with PG_ERR_WRONG_SHARD, and PUBLISH with PG_ST_WRONG_SHARD. */
void pg_confine(struct pg_arena *a);
/* Return whether nothing is armed, no outcome waits for its acknowledgement, and all notices were
 * handed to the socket. */
int pg_drained(const struct pg_arena *a);
/* Return whether an eighth of the payload memory is free, but a large payload does not fit, because
 * compaction could not join the free blocks. */
int pg_fragmented(const struct pg_arena *a);
/* Return the number of due timers that do not fire because their topic or namespace is paused. */
uint64_t pg_paused_due(const struct pg_arena *a);
void pg_start_epoch(struct pg_arena *a, const uint8_t boot_id[16]);
void pg_heartbeat(struct pg_arena *a, int64_t real_boot_ns, uint64_t iterations, uint64_t wakeups,
                  uint64_t sent, uint64_t log_dropped);
/* Write a heartbeat while the daemon starts or stops, because its loop does not iterate then. */
void pg_progress(struct pg_arena *a, int64_t real_boot_ns);

/* ---- how long things take (metrics.c) --------------------------------------------------- */

/* Add a duration that the caller has measured to a histogram (enum pg_histogram_id). */
void pg_measure(struct pg_arena *a, uint32_t histogram, int64_t ns);
/* Count a record's status if the status is a refusal. Returns whether it is a refusal. */
int pg_refused(struct pg_arena *a, uint32_t status);
/* Note that the last pg_handle returned at ended_boot_ns. Call this before the next pg_handle. */
void pg_served(struct pg_arena *a, int64_t ended_boot_ns);
/* Note that the message of the last pg_inbox was built at built_boot_ns, and that the socket took
 * it at handed_boot_ns. Call this before any other function, and only if the message was sent. */
void pg_notified(struct pg_arena *a, int64_t built_boot_ns, int64_t handed_boot_ns);
/* Note that the message of the last pg_inbox was not sent because its owner is not connected. Its
 * outcomes then wait for the owner, not for the daemon, and their latency is not measured. Call
 * this instead of pg_notified. */
void pg_untaken(struct pg_arena *a);
/* Append a METRICS record if there is a WAL and its buffer has space. */
void pg_wal_append_metrics(struct pg_arena *a, int64_t real_boot_ns);

/* ---- the WAL buffer (wal_buffer.c) --------------------------------------------------- */

/* Return the WAL buffer; NULL = the arena has no WAL. Only the group-commit thread writes the
 * fields marked "written by group commit"; every thread may read all fields. */
struct pg_wal_buffer *pg_wal_buffer_of(const struct pg_arena *a);
/* Return whether the WAL buffer is so full that cancelling, firing and other ends of timers have to
 * wait until `committed` has moved. */
int pg_wal_buffer_full(const struct pg_arena *a);
/* Return the LSN that must be on disk before the reply of the last pg_handle may be sent; 0 = the
 * reply need not wait. */
uint64_t pg_durable_lsn(const struct pg_arena *a);
/* Copy whole frames from position `from` of the ring up to the tail, as many as fit, without PAD
 * frames and with crc and salt 0. Returns the number of bytes copied; *upto = the position after
 * the copied frames, *lsn = LSN of the last copied frame (unchanged if none was copied). out_bytes
 * is at least PG_WAL_FRAME_MAX. The group-commit thread may call this while the daemon runs. */
uint64_t pg_wal_buffer_copy(const struct pg_arena *a, uint64_t from, void *out, uint64_t out_bytes,
                            uint64_t *upto, uint64_t *lsn);

/* ---- snapshots (snapshot.c): from a reader of a live arena ------------------------------ */

struct pg_snapshot {              /* progress of a snapshot; the caller sets `quiet`, and all other
                                     fields to 0 */
    uint32_t quiet;               /* 1 = nobody changes the arena during the snapshot, so the
                                     snapshot is complete without a WAL */
    uint32_t done;                /* 1 = the LAST frame was written */
    uint64_t phase;
    uint64_t next, end;           /* next item, and end of the items, of the current phase */
    uint64_t frames;              /* number of frames written */
    uint64_t start_lsn;           /* LSN from which the WAL has to be redone over the snapshot */
    uint64_t end_lsn;             /* when done: LSN that must be in the WAL before the snapshot is
                                     valid */
};
/* Write the next whole frames of a snapshot, which has all authoritative state except sessions. The
 * frames are not sealed; their LSNs count from 1. Returns the number of bytes written; call this
 * until s->done. out_bytes is at least PG_WAL_FRAME_MAX. The arena may change between the calls,
 * because the WAL has every change after start_lsn. */
uint64_t pg_snapshot(const struct pg_arena *a, struct pg_snapshot *s, void *out,
                     uint64_t out_bytes);

/* ---- the WAL's files (wal_segment.c, crc32c.c) -------------------------------------------- */

/* Return the CRC-32C of earlier bytes followed by these bytes; `crc` is the CRC-32C of the earlier
 * bytes, or 0 if there are none. */
uint32_t pg_crc32c(uint32_t crc, const void *bytes, uint64_t count);

/* State of a WAL reader (struct pg_walk): it is reading, or it stopped after the last whole commit
 * group for the given reason. */
enum pg_walk_state {
    PG_WALK_NONE,                 /* nothing has been read */
    PG_WALK_GROUPS,               /* another commit group may follow */
    PG_WALK_SEALED,               /* the segment is complete, and the next segment continues it */
    PG_WALK_END,                  /* only zeros follow */
    PG_WALK_TORN,                 /* parts of the newest commit group follow; this group was not
                                     committed */
    PG_WALK_DAMAGED               /* committed frames after this point are damaged and lost */
};

/* Reader of WAL segments in order. The caller initialises the struct with zeros. Each segment is
 * whole in memory and aligned to 8 bytes. */
struct pg_walk {
    struct pg_wal_segment header; /* header of the current segment */
    const uint8_t *bytes;
    uint64_t size;
    uint64_t at;                  /* offset of the byte after the last whole commit group */
    uint64_t next;                /* offset of the next frame; at most `at` */
    uint64_t lsn;                 /* LSN of the last frame of the last whole commit group */
    uint64_t group;               /* number of the last whole commit group */
    int64_t boot_ns;              /* boot_ns and wall_ns of the last whole commit group, or of the
                                     header before the first group */
    int64_t wall_ns;
    uint64_t bad_from;            /* TORN, DAMAGED: range of bytes that differ from those that were
                                     written */
    uint64_t bad_to;
    uint64_t lost_from;           /* DAMAGED: first lost LSN */
    uint64_t lost_to;             /* DAMAGED: last lost LSN; lost_from - 1 = no LSN is lost */
    uint32_t state;               /* enum pg_walk_state */
    uint32_t reserved;
};

/* Begin the next segment. Refuses a file that is not a WAL segment, a segment of another arena, and
 * a segment that does not continue where the reader stopped; in the last case the state is
 * DAMAGED. */
int pg_walk_segment(struct pg_walk *w, const void *bytes, uint64_t size, struct pg_fault *why);
/* Return the next frame of a whole commit group, without COMMIT_GROUP and SEAL frames. NULL = there
 * is none; w->state has the reason. */
const struct pg_frame_head *pg_walk_next(struct pg_walk *w);
/* In state DAMAGED, continue to read at the next commit group or SEAL of the file, if all records
 * that are lost before that point have LSNs below live_lsn. Otherwise returns 0 and changes
 * nothing. */
int pg_walk_skip(struct pg_walk *w, uint64_t live_lsn);
/* Write the first PG_WAL_SEGMENT_HEAD bytes of a file from `fields`. The function fills in major,
 * minor and crc. */
void pg_wal_segment_begin(void *block, const struct pg_wal_segment *fields);
/* Seal a commit group of `bytes` bytes: PG_GROUP_HEAD bytes of space for the COMMIT_GROUP frame,
 * then frames. Fills in the COMMIT_GROUP frame from `fields`, except fields->bytes, which is
 * computed. */
void pg_group_seal(void *group, uint64_t bytes, uint32_t salt, const struct pg_wal_group *fields);
/* Write the SEAL frame that follows the last commit group of a file; `group` is the number of that
 * commit group, `lsn` the LSN of its last frame. */
void pg_wal_segment_end(struct pg_frame_head *seal, uint32_t salt, uint64_t group, uint64_t lsn);

/* Return the timestamps in a frame of a known type. If the frame replaces a timer, *replaced = the
 * timestamps of the replaced timer, else NULL. Returns NULL if the frame has no timestamps, as in
 * exports of arenas without a WAL. The frame must come from pg_walk_next. */
const struct pg_timestamps *pg_frame_timestamps(const struct pg_frame_head *frame,
                                                const struct pg_timestamps **replaced);
/* Return the request that ended the frame's timer; NULL = the frame contains no such request. */
const struct pg_asked *pg_frame_asked(const struct pg_frame_head *frame);

/* ---- notices in WAL files (past_notices.c) --------------------------------------------------- */

struct pg_past {                  /* a notice in a WAL file */
    uint64_t sequence;
    uint64_t ticket;              /* 0 = the frame of the notice contains key and payload */
    uint64_t origin_lsn;          /* LSN of the frame with its key and payload; 0 = unknown */
    const void *notice;           /* frame of the notice */
    const void *origin;           /* frame with its key and payload; NULL = not found */
    int64_t shift_ns;             /* is added to the times of the notice */
    int64_t origin_shift_ns;      /* is added to the times of `origin` */
};
struct pg_past_search {           /* the caller sets the fields from `topic` to `found` */
    uint32_t topic;               /* row of the topic */
    uint32_t capacity;            /* length of `found` */
    uint64_t incarnation;         /* incarnation of the topic */
    uint64_t first, last;         /* sequences */
    struct pg_past *found;        /* the notices, in the order of their sequences */
    uint32_t count;
    uint32_t born;                /* 1 = the frames contain the creation of the topic */
    uint32_t over;                /* 1 = another topic has taken the row */
    uint32_t pad;
};
/* Search successive frames for notices of a topic. Returns 1 if the search is complete. */
int pg_past_find(struct pg_past_search *s, const void *frames, uint64_t bytes);
/* Return the frame with this LSN, if it has key and payload of this ticket; else NULL. */
const void *pg_past_origin(const void *frames, uint64_t bytes, uint64_t lsn, uint64_t ticket);
/* Find the origin of each notice by its ticket. `order`: indexes of `count` notices, in the order of
 * their tickets. `shift_ns` is added to the times of these frames. */
void pg_past_match(struct pg_past *found, const uint32_t *order, uint32_t count,
                     const void *frames, uint64_t bytes, int64_t shift_ns);
/* Write the first notices of `found` that have successive sequences, have an origin, and fit into `size`
 * bytes, in the form of the second frame of a notice message. Sets head->count. Returns the number
 * of bytes. */
uint64_t pg_past_write(const struct pg_past *found, uint32_t count, struct pg_notices *head,
                       void *bytes, uint64_t size);

/* ---- columns (wal_columns.c): records as the columns of a table --------------------------- */

/* The columns of the table have the names of these constants, in lower case. Columns of strings
 * hold numbers that stand for words: `kind` is the type of the record (0 = unknown), `namespace`
 * and `topic` are row numbers, and the other columns of strings hold enums of layout.h. If a record
 * lacks a property, the property's column has no value for it. */
enum pg_long_column {
    PG_LC_LSN, PG_LC_AT,          /* AT: microseconds since 1970, UTC */
    PG_LC_AT_NS, PG_LC_TICKET, PG_LC_DEADLINE_NS, PG_LC_WALL_DEADLINE_NS, PG_LC_SENT_NS,
    PG_LC_RECEIVED_NS, PG_LC_APPLIED_NS, PG_LC_ARMED_NS, PG_LC_ADD_LSN, PG_LC_SESSION,
    PG_LC_ENDED_BOOT_NS, PG_LC_SEQUENCE, PG_LC_POSITION, PG_LC_REPLACED, PG_LC_THRESHOLD,
    PG_LC_WATERMARK, PG_LC_POSITIONS_FROM, PG_LC_POSITIONS_UPTO, PG_LC_BUILT_NS, PG_LC_HANDED_NS,
    PG_LC_BULK_LOAD_ROW, PG_LC_PAYLOAD_BYTES,
    PG_LC_REPLACED_ADD_LSN, PG_LC_REPLACED_SESSION, PG_LC_REPLACED_SENT_NS,
    PG_LC_REPLACED_RECEIVED_NS, PG_LC_REPLACED_APPLIED_NS, PG_LC_REPLACED_ARMED_NS,
    PG_LC_REPLACED_DEADLINE_NS, PG_LC_ENDED_BY, PG_LC_ENDED_BATCH,
    PG_LC_DONE_NS, PG_LC_REPLACED_DONE_NS, PG_LC_SLACK_NS, PG_LC_INCARNATION, PG_LC_LEASED_NS,
    PG_LONG_COLUMNS
};
enum pg_int_column {
    PG_IC_KIND, PG_IC_CLOCK, PG_IC_NAMESPACE, PG_IC_TOPIC, PG_IC_KEY_TYPE, PG_IC_PAYLOAD_LEN,
    PG_IC_UID, PG_IC_SLOT, PG_IC_CAUSE, PG_IC_ERROR, PG_IC_FLAGS, PG_IC_CONDITION, PG_IC_ROW,
    PG_IC_COUNT, PG_IC_PARKED, PG_IC_BULK_LOADED, PG_IC_REPLACED_BULK_LOADED,
    PG_IC_JOB_STATE, PG_IC_DEAD_REASON, PG_IC_LEASES, PG_IC_FAILURES, PG_INT_COLUMNS
};
/* NAME: name of a namespace, topic or worker. */
enum pg_bytes_column { PG_BC_KEY, PG_BC_PAYLOAD, PG_BC_MISSING, PG_BC_BULK_LOAD, PG_BC_NAME,
                       PG_BC_ERROR_TEXT, PG_BYTES_COLUMNS };
enum pg_cause_column { PG_CAUSE_ACKNOWLEDGED = 6, PG_CAUSE_DROPPED, PG_CAUSE_SKIPPED,
                       PG_CAUSE_COALESCED };  /* values of the cause column
                                                                          for END records; they
                                                                          follow the values of enum
                                                                          pg_cause */

/* Bit n of `valid` is set if row n has a value. `count` is the number of rows with a value. */
struct pg_longs { int64_t *values; uint8_t *valid; uint32_t count; };
struct pg_ints { int32_t *values; uint8_t *valid; uint32_t count; };
struct pg_bytes { int32_t *offsets; uint8_t *bytes, *valid; uint32_t count, used; };
struct pg_watch_lists {
    int32_t *offsets, *row, *flags;
    int64_t *target, *base, *cap;
    uint8_t *valid;
    uint32_t count, used;
};

/* The caller provides the memory: for `capacity` rows, `capacity` + 1 offsets, `bytes_max` bytes in
 * each column of bytes, and bytes_max / 32 watch keys. At the start all bits and offsets[0] are
 * 0. */
struct pg_columns {
    uint32_t rows;
    uint32_t capacity;
    uint32_t bytes_max;           /* capacity of each bytes column; at least PG_WAL_FRAME_MAX */
    uint32_t payloads;            /* 0 = leave payloads out */
    uint64_t kinds[32];           /* number of records of each type; [0] = records of unknown
                                     types */
    struct pg_longs longs[38];
    struct pg_ints ints[21];
    struct pg_bytes bytes[6];
    struct pg_watch_lists watch;
};

/* Namespaces and topics whose names a WAL reader has seen, by row. All elements are PG_NIL at the
 * start. The values are kept from file to file. */
struct pg_births {
    uint32_t namespaces[65536];   /* number of the row, once the reader has seen the name of its
                                     namespace */
    uint32_t topics[65536];       /* row of the topic's namespace, once the reader has seen the name
                                     of the topic */
};

/* Append records until the columns are full (returns 1) or the WAL reader has no more frames
 * (returns 0). */
int pg_columns_fill(struct pg_columns *c, struct pg_births *births, struct pg_walk *walk);
/* Do what pg_columns_fill does, but only for records that contain the name of a new namespace,
 * topic or session. */
int pg_columns_names(struct pg_columns *c, struct pg_births *births, struct pg_walk *walk);

/* ---- redo (redo.c): frames into a fresh arena ---------------------------------------------- */

struct pg_redo {                  /* progress of a redo; the caller sets all fields to 0 */
    uint64_t frames;              /* number of frames read from the snapshot */
    uint64_t next_lsn;            /* next LSN of the WAL after the whole snapshot has been read; 0
                                     before */
    uint64_t end_lsn;             /* end_lsn of the snapshot; the arena is complete when next_lsn is
                                     above end_lsn */
};
/* Read the settings of the new arena from the first frame of a snapshot. The caller has to set
 * layout_id, secret, sessions, page_size, stream_id and boot_id. */
int pg_redo_config(const void *frame, uint64_t bytes, struct pg_config *config,
                   struct pg_fault *why);
/* Apply a buffer of whole frames, aligned to 8 bytes. The first calls pass the whole snapshot. The
 * later calls pass the WAL from the snapshot's start LSN on; older frames are skipped. Redo is
 * idempotent. Refuses a frame that names an object that does not exist, a gap in the LSNs, and a
 * change for which there is no space. A snapshot is written while its arena changes, so its
 * contents may need a larger arena than the one that was copied; in that case pg_migrate must
 * follow. why->where is the LSN of the refused frame. */
int pg_redo(struct pg_arena *a, struct pg_redo *r, const void *frames, uint64_t bytes,
            struct pg_fault *why);
/* Do what pg_redo does, with all remaining frames of the file that a WAL reader is reading. */
int pg_redo_file(struct pg_arena *a, struct pg_redo *r, struct pg_walk *walk,
                 struct pg_fault *why);
/* Finish after the last frame: add shift_ns to all times on the arena's clock, and skip tickets
 * that a power cut may have lost. A rebuild at now_ns must follow. If the boot id differs, shift_ns =
 * wall offset in the earlier boot - wall offset in this boot; else 0. */
int pg_redo_end(struct pg_arena *a, const struct pg_redo *r, int64_t now_ns, int64_t real_boot_ns,
                int64_t shift_ns, int64_t wall_offset_ns, struct pg_fault *why);

/* ---- group commit (group_commit.c): from the WAL buffer to disk ---------------------------- */

/* The system calls of the group-commit thread. Each returns what the system call returns and sets
 * errno. Tests provide their own. */
struct pg_storage {
    void *context;
    int (*open)(void *context, int directory, const char *name, int flags); /* directory = -1 means
                                                                               none */
    int64_t (*pwrite)(void *context, int file, const void *bytes, uint64_t count, uint64_t at);
    int (*fallocate)(void *context, int file, uint64_t bytes);
    int (*fdatasync)(void *context, int file);
    int (*rename)(void *context, int directory, const char *from, const char *to);
    int (*fsync_dir)(void *context, int directory);
    int (*close)(void *context, int file);
    int64_t (*clock_ns)(void *context);                  /* monotonic clock, which measures syncs */
};

struct pg_group_commit;
uint64_t pg_group_commit_bytes(void);
/* Open the WAL in `directory`. `end` is a WAL reader that has read the newest segment to its end.
 * The function completes that segment and begins the next segment. If `end` is in state NONE, a new
 * WAL begins after the LSN and the commit group in `end`. The segment that `end` has read must
 * still be in memory, because its bytes after committed_lsn are written again. When the function
 * returns, all appended frames are on disk. wal_segment_bytes is the size of new segments, a
 * multiple of PG_WAL_SEGMENT_HEAD and at least PG_WAL_SEGMENT_MIN. storage = NULL uses the system
 * calls themselves. After a refusal nothing is open. If a system call failed, `why` names the call,
 * why->where is the LSN and why->found is the errno. */
int pg_group_commit_open(struct pg_group_commit *c, struct pg_arena *a, const char *directory,
                         uint64_t wal_segment_bytes, const struct pg_walk *end,
                         const struct pg_storage *storage, struct pg_fault *why);
/* Write one commit group of appended frames to disk. Returns 0 if no frames were appended. The
 * group-commit thread calls this in a loop. */
int pg_group_commit_iterate(struct pg_group_commit *c);
int pg_group_commit_start(struct pg_group_commit *c, struct pg_fault *why);    /* starts the
                                                                                  thread */
/* Wake the group-commit thread after a frame was appended; cheap while the thread is busy. */
void pg_group_commit_kick(struct pg_group_commit *c);
/* Return an eventfd that becomes readable when committed_lsn has moved or the state is
 * PG_WAL_STOPPED. */
int pg_group_commit_fd(const struct pg_group_commit *c);
/* Pause the group-commit thread, which then uses neither the arena nor its files. Returns 0 if the
 * thread is still busy: call again when the eventfd is readable. While the thread pauses, the arena
 * may move to other addresses. */
int pg_group_commit_pause(struct pg_group_commit *c);
void pg_group_commit_unpause(struct pg_group_commit *c);
int pg_group_commit_pausing(const struct pg_group_commit *c);                  /* 1 = a pause was
                                                                                  requested */
/* End the group-commit thread after it has committed all appended frames. The thread must not be
 * paused. */
void pg_group_commit_stop(struct pg_group_commit *c);
void pg_group_commit_close(struct pg_group_commit *c);                         /* closes the
                                                                                  files */

/* The loop's requests of commits (wal/commit_requests.c). Callers whose replies left together usually
 * call again together, and can share the next sync. So the next commit waits until as many replies
 * are pending again, for at most half the time of a sync. */
struct pg_commit_requests {
    struct pg_group_commit *commit;
    uint64_t requested;           /* position in the WAL buffer up to which a commit was requested */
    uint64_t callers;             /* replies that were pending when the last commit allowed some */
    int64_t  wait_ns;             /* longest time that a commit waits for more callers */
    int64_t  until_boot_ns;       /* the commit that waits is requested at this time; INT64_MAX =
                                     none waits */
    uint64_t syncs, sync_ns;      /* those of the WAL buffer when a commit last allowed replies */
    uint8_t  confirmed;           /* 1 = committed frames can be recovered, so that durable replies
                                     may be sent */
};
/* Set up the requests of an arena's commits. */
void pg_commit_requests_init(struct pg_commit_requests *r, const struct pg_arena *a,
                             struct pg_group_commit *c);
/* Return the newest LSN whose durable replies may be sent. */
uint64_t pg_confirmed_lsn(const struct pg_arena *a, const struct pg_commit_requests *r);
/* Return 1 if the next commit is to be requested. `callers`: number of replies that wait for it. A
 * commit may wait while another is under way, whose end wakes the loop. */
int pg_commit_is_due(const struct pg_arena *a, struct pg_commit_requests *r, uint64_t callers,
                     int64_t now_boot_ns);
/* Request a commit of all frames. */
void pg_commit_request(const struct pg_arena *a, struct pg_commit_requests *r);
/* Note that a commit allowed replies. `callers`: number of replies that were pending before. */
void pg_commit_allowed(const struct pg_arena *a, struct pg_commit_requests *r, uint64_t callers);

/* ---- where memory is (memory.c): system calls, without an arena ---------------------------- */

#define PG_NODES_MAX 1024             /* 1 + the highest possible number of a NUMA node */
#define PG_MEMORY_SAMPLES 128

/* These functions return 0 or an errno; ENOSYS = the kernel has no NUMA support. */

/* Prefer NUMA node `node` for new memory of this thread and of the threads that it starts. Memory
 * that was touched before stays where it is. */
int pg_memory_prefer(uint32_t node);
/* Prefer NUMA node `node` for this memory, which consists of whole pages, whichever thread touches
 * it. move = 1: also move pages from other nodes, as far as the kernel can. */
int pg_memory_bind(void *memory, uint64_t bytes, uint32_t node, int move);
/* Look up the nodes of PG_MEMORY_SAMPLES evenly spread pages, and set *elsewhere to the number of
 * these pages that are not on `node`. */
int pg_memory_elsewhere(const void *memory, uint64_t bytes, uint32_t node, uint32_t *elsewhere);
/* Let this thread, and the threads that it starts, run for at most slice_ns before a thread that waits
 * for the CPU. The scheduling policy becomes SCHED_OTHER; the nice value stays. Kernels before Linux
 * 6.12 ignore the length. */
int pg_thread_slice(uint64_t slice_ns);
/* Lock all mapped memory of this process into RAM. */
int pg_memory_lock(void);

/* ---- a wheel in private memory (local.c) ------------------------------------------------- */

struct pg_local;
uint64_t pg_local_bytes(uint32_t capacity, int64_t tick_ns, uint32_t fanout);
/* Create a wheel in `memory`, which has pg_local_bytes() bytes and is aligned to 16 bytes. */
struct pg_local *pg_local_create(void *memory, uint32_t capacity, int64_t tick_ns,
                                 uint32_t fanout, int64_t now_ns);
/* Add a timer. Returns its slot, which pg_local_cancel takes; PG_NIL = all slots are in use. The
 * slot is free again after the timer has been cancelled or returned as due. */
uint32_t pg_local_add(struct pg_local *l, int64_t deadline_ns);
void pg_local_cancel(struct pg_local *l, uint32_t slot);
/* Write the slots of due timers to `due` and return their number; *more = 1: call again at once. */
uint32_t pg_local_advance(struct pg_local *l, int64_t now_ns, uint32_t *due, uint32_t due_max,
                          int *more);
int64_t pg_local_next_ns(const struct pg_local *l);
int pg_local_check(const struct pg_local *l, struct pg_fault *fault);

/* ---- rings (ring.c, doorbell.c) ---------------------------------------------------------- */

struct pg_ring_end {              /* one side of a ring; private to its process */
    struct pg_ring *words;
    uint8_t *bytes;
    uint64_t size;                /* bytes; a power of two */
    uint64_t own, other;          /* own position, and the last position of the other side that was
                                     read and found sound */
    uint64_t length;              /* bytes of the message that is being put or taken; 0 = none */
    uint64_t done;                /* bytes of this message that were put or taken */
    uint64_t wanted;              /* bytes that the last put lacked space for; 0 = none */
    uint32_t broken;              /* 1 = the other side stored something impossible */
    uint32_t recalled;            /* 1 = another thread of this process needs the end, and the taker
                                     must not sleep */
};

/* Set up one side of a new ring, whose positions are 0. */
void pg_ring_open(struct pg_ring_end *end, struct pg_ring *words, void *bytes, uint64_t size);
/* Put a message. Returns 1 = all of it is in the ring; 0 = there is no space, so call again with
 * the same message. Only a message that is larger than the ring goes in pieces. */
int pg_ring_put(struct pg_ring_end *end, const void *message, uint64_t bytes);
/* Return the length of the next message, if all of it or a piece of a message that is larger than
 * the ring can be taken; 0 = no. */
uint64_t pg_ring_next(struct pg_ring_end *end);
/* Take the next message, after pg_ring_next, which returned its length. Returns 1 = `out` has all
 * of it; 0 = `out` has a part, so call both functions again with the same memory. */
int pg_ring_take(struct pg_ring_end *end, void *out);
/* Copy the first bytes of the next message, after pg_ring_next, which returned its length; the
 * message is not larger than the ring, and stays in it. */
void pg_ring_peek(const struct pg_ring_end *end, void *out, uint64_t bytes);
/* Announce that this side is about to sleep (enum pg_ring_sleep) until there is a message, or space
 * for the message that was being put. Returns 1 = it may sleep; 0 = there is one already. */
int pg_ring_sleep_taker(struct pg_ring_end *end, uint32_t how);
int pg_ring_sleep_putter(struct pg_ring_end *end, uint32_t how);
/* Return how the taker, or the putter, at the other side sleeps (enum pg_ring_sleep), and expect
 * that the caller wakes it. Call this after each put, or take. */
uint32_t pg_ring_rouse_taker(struct pg_ring_end *end);
uint32_t pg_ring_rouse_putter(struct pg_ring_end *end);
int64_t pg_boot_ns(void);         /* CLOCK_BOOTTIME */
/* Wake the daemon by its eventfd. */
void pg_ring_signal(int eventfd);
/* Wake a client that sleeps as `how` says, on `word` or on the other end of `socket`. */
void pg_ring_wake(uint32_t how, uint32_t *word, int socket);
/* Announce a sleep by futex, as pg_ring_sleep_taker does, unless the end was recalled. */
int pg_ring_sleep_unless_recalled(struct pg_ring_end *end);
/* Recall the end from the thread that takes messages, and return how it sleeps (enum pg_ring_sleep);
 * the caller wakes it. */
uint32_t pg_ring_recall(struct pg_ring_end *end);
/* Sleep for at most `limit_ns`, after the sleep by futex was announced, until another thread or
 * process wakes this side. Returns 0 if a signal ended the sleep, else 1. */
int pg_ring_sleep(struct pg_ring_end *end, int64_t limit_ns);

/* ---- the messages of all clients (front/ring_server.c, ring/router.c, ring/time_shares.c) ------- */

/* CPU time of one uid, in the iteration of the loop in which it was last charged. */
struct pg_time_share {
    uint64_t iteration;
    int64_t spent_ns;
    uint32_t uid;
};
/* The shares of all uids in an iteration of the loop. They apply only while several uids send
 * messages. */
struct pg_time_shares {
    uint64_t iteration;
    int64_t most_ns;              /* share of each uid */
    int64_t lasts_ns;             /* shares apply for this long after a message whose uid differs
                                     from that of the previous message */
    int64_t until_boot_ns;        /* time until which shares apply */
    uint32_t last_uid;
    uint8_t  charged;             /* 1 = last_uid is set */
    uint8_t  apply;               /* 1 = shares apply in this iteration */
};
/* Begin an iteration. */
void pg_time_shares_begin(struct pg_time_shares *s, int64_t boot_ns);
/* Return 1 if a uid has used up its share of this iteration. */
int pg_time_share_used(const struct pg_time_shares *s, const struct pg_time_share *one);
/* Charge a uid for a message that took until `ended_boot_ns`. */
void pg_time_share_charge(struct pg_time_shares *s, struct pg_time_share *one,
                          int64_t begun_boot_ns, int64_t ended_boot_ns);

/* Functions of libzmq, as zmq.h declares them. Tests provide their own. */
struct pg_zmq_calls {
    int (*recv)(void *socket, void *buffer, size_t bytes, int flags);
    int (*send)(void *socket, const void *buffer, size_t bytes, int flags);
    int (*msg_init)(void *message);
    int (*msg_init_size)(void *message, size_t bytes);
    int (*msg_recv)(void *message, void *socket, int flags);
    int (*msg_send)(void *message, void *socket, int flags);
    int (*msg_close)(void *message);
    void *(*msg_data)(void *message);
    size_t (*msg_size)(const void *message);
    int (*msg_more)(const void *message);
    int (*msg_get)(const void *message, int property);
    const char *(*msg_gets)(const void *message, const char *property);
};

#define PG_ROUTE_MAX 255

/* The ROUTER socket of requests (ring/router.c). */
struct pg_router {
    const struct pg_zmq_calls *calls;                    /* NULL only if `each` is always 1 */
    void    *socket;
    int32_t  fd;                  /* becomes readable when the socket has news */
    uint8_t  quiet;               /* 1 = the socket had no message at the last call. `fd` is then
                                     readable once it has one. */
    uint8_t  each;                /* 1 = the caller receives each message itself */
    uint8_t  rest;                /* 1 = frames of a message are left, which the caller drops */
    uint8_t  open;                /* 1 = `message` is open */
    struct pg_ring_client **clients;                     /* by the row of their session; NULL = the
                                                            row has no client of this socket */
    uint32_t rows;                /* number of elements of `clients` */
    uint32_t descriptors;         /* number of elements of `completed` */
    uint8_t *completed;           /* 1 = a message came through this descriptor; cleared by the
                                     caller */
    uint64_t reply_max;           /* larger replies are left to the caller */
    /* the last message that was received */
    uint64_t message[8];          /* a zmq_msg_t, open until the next message is received */
    uint8_t  route[PG_ROUTE_MAX]; /* routing id of the sender */
    uint32_t route_bytes;         /* more than PG_ROUTE_MAX = the routing id was cut */
    int32_t  connection;          /* descriptor of the connection, which may be closed */
    const char *user_id;          /* credentials of the sender, as the ZAP handler gave them */
    const char *address;          /* address of the sender; only after PG_RE_OFFENCE */
};

/* A client of rings, or one whose messages come through the ROUTER socket. */
struct pg_ring_client {
    struct pg_ring_end *taker, *putter;                  /* NULL = a client of the socket */
    struct pg_time_share *share;       /* NULL only if session = 0 */
    uint64_t session;             /* the session whose messages pg_rings_serve applies; 0 = none */
    uint32_t pid;                 /* pid of the client, from the kernel; 0 = unknown */
    int32_t  socket;              /* descriptor of the connection; only of rings */
    const uint8_t *route;         /* routing id; only of a client of the socket, like the next two */
    uint32_t route_bytes;
    const char *user_id;          /* the credentials that each of its messages has */
    uint8_t  gone;                /* 1 = the connection has ended */
    uint8_t  replies;             /* 1 = the caller has replies for which there is no space */
    uint8_t  behind;              /* 1 = the caller has an unfinished message of this client */
    uint8_t  spoke;               /* 1 = a message was applied; cleared by the caller */
    uint8_t  awake;               /* 1 = pg_rings_serve looks at these rings */
    struct pg_ring_client *next;  /* the next one that is awake, in a circle */
    uint32_t pending;             /* number of replies that wait for a commit */
    uint64_t answered_session;    /* session of the answers that need a REPLIED record */
    uint64_t first_answer;        /* sequence of the first of them */
    uint32_t answers;             /* number of these answers; 0 = none */
    int64_t  built_boot_ns;       /* time at which the first of them was complete */
    int64_t  handed_boot_ns;      /* time at which the last of them was in the ring */
    struct pg_ring_client *next_answered;
};

enum pg_woken {                   /* causes of the end of a sleep of the loop */
    PG_WOKEN_FOR_CALLER,          /* the caller of pg_loop_wait has something to do */
    PG_WOKEN_BY_RINGS,            /* clients rang, or there was no sleep */
    PG_WOKEN_BY_TIME
};

struct pg_ring_server;
/* The system calls of the loop. Tests provide their own. */
struct pg_loop_calls {
    void *context;
    int64_t (*boot_ns)(void *context);                   /* CLOCK_BOOTTIME */
    int64_t (*wall_ns)(void *context);                   /* CLOCK_REALTIME */
    void (*wake)(void *context, uint32_t how, uint32_t *word, int socket);  /* pg_ring_wake */
    /* Sleep until `until_boot_ns`, or until the loop is woken; INT64_MIN = do not sleep. Rouse the
     * rings whose clients rang. Returns enum pg_woken. */
    int (*wait)(void *context, struct pg_ring_server *s, int64_t until_boot_ns);
};

/* Replies that wait for commits, in the order of LSNs. */
struct pg_pending_reply {
    uint64_t lsn;                 /* the reply may be sent once this frame is on disk; 0 = padding */
    struct pg_ring_client *client;
    int64_t  built_boot_ns;       /* time at which the reply was complete */
    uint64_t bytes;               /* bytes of the reply, which follow */
};
struct pg_pending_replies {
    uint8_t *memory;              /* aligned to 8 bytes */
    uint64_t size;                /* bytes of `memory`; a power of two, or 0 = no reply may wait */
    uint64_t head, tail;          /* positions of the oldest reply, and after the newest */
    uint64_t count, newest_lsn;
};

enum pg_ring_event {
    PG_RE_NONE,                   /* there is no message that can be taken in this iteration */
    PG_RE_ENOUGH,                 /* `most` messages were applied */
    PG_RE_LOOK,                   /* the caller looks at the rings of `client`: it keeps replies or
                                     an unfinished message, the connection has ended, the client
                                     broke the rules, or the message is larger than the ring. If
                                     `client` is NULL, the caller receives the next message of the
                                     ROUTER socket itself. */
    PG_RE_MESSAGE,                /* a message was taken that the caller applies */
    PG_RE_REPLY,                  /* a message was applied; the caller sends the reply */
    PG_RE_AGAIN,                  /* a message was applied in part; the caller continues with it */
    PG_RE_OFFENCE                 /* a message with more frames, or a longer routing id, than a
                                     client sends; the rest of its frames is left in the socket */
};

struct pg_ring_server {
    const struct pg_loop_calls *calls;                   /* NULL = the system calls themselves */
    uint8_t *message;             /* space for a message of a ring's size */
    void    *reply;               /* PG_MESSAGE_MAX bytes */
    struct pg_router *router;     /* the ROUTER socket; NULL = none */
    uint8_t  from_router;         /* 1 = the last message, or the next one, is that of the socket */
    struct pg_ring_client *last;  /* the last in the circle of rings that are awake; NULL =
                                     none is awake */
    struct pg_ring_client *answered;                     /* clients with answers, newest first */
    struct pg_commit_requests *commits;                  /* NULL = the arena has no WAL */
    struct pg_pending_replies pending;
    uint64_t callers_pending;     /* number of replies that the caller keeps until their frames are
                                     on disk; later durable replies are left to it as well */
    uint32_t awake;               /* number of rings that are awake */
    uint32_t unseen;              /* number of rings that had no message since they were all seen */
    /* results of pg_rings_serve */
    struct pg_ring_client *client;                       /* the client of the event; NULL = the
                                                            event is one of the ROUTER socket */
    const void *body;             /* the message, valid until the next message is received */
    uint64_t message_bytes, reply_bytes;
    int64_t  received_boot_ns;    /* time at which the last message was taken */
    int64_t  built_boot_ns;       /* time at which its reply was complete */
    int64_t  handed_boot_ns;      /* time at which its reply was in the ring, if it is */
    uint32_t applied;             /* number of messages that were applied */
    uint32_t left;                /* the event that pg_loop_wait left to its caller */
};

/* Apply at most `most` messages of rings and of the ROUTER socket, and put or send their replies. The
 * socket and the rings take turns, and so do the rings, one message each. Returns enum pg_ring_event
 * at the first message that needs the caller. Only messages of the client's own session are applied
 * that neither begin nor end it. */
uint32_t pg_rings_serve(struct pg_arena *a, struct pg_ring_server *s,
                        struct pg_time_shares *shares, uint32_t most);
/* Put the pending replies whose frames are on disk. Returns 1 if the caller has to send the oldest
 * pending reply: the ring has no space, or the caller keeps earlier replies. */
int pg_pending_release(struct pg_arena *a, struct pg_ring_server *s);
/* Return the oldest pending reply; NULL = none. */
struct pg_pending_reply *pg_pending_oldest(struct pg_pending_replies *h);
/* Drop the oldest pending reply. */
void pg_pending_drop(struct pg_pending_replies *h);
/* Append REPLIED records of the answers that were put, if the WAL buffer has space. */
void pg_rings_replied(struct pg_arena *a, struct pg_ring_server *s);
/* Look at a client's rings from now on, until pg_rings_sleep. */
void pg_rings_rouse(struct pg_ring_server *s, struct pg_ring_client *c);
/* Forget a client. Answers that were put for it get no REPLIED record any more. */
void pg_rings_remove(struct pg_ring_server *s, struct pg_ring_client *c);
/* Return whether a ring that is awake has a message or has ended, or the ROUTER socket may have a
 * message. */
int pg_rings_ready(struct pg_ring_server *s);
/* Announce to all rings that the daemon is about to sleep. Returns 0 if a ring has a message, or the
 * ROUTER socket may have one. */
int pg_rings_sleep(struct pg_ring_server *s);
/* Let the daemon wait for the eventfd of a client in `bells`, an epoll descriptor. Returns 0, or -1
 * with errno. */
int pg_bell_watch(int bells, int eventfd, struct pg_ring_client *c);
/* Rouse the rings of the clients that have rung. */
void pg_bells_take(int bells, struct pg_ring_server *s);

/* ---- the place where the loop sleeps (front/ring_loop.c) ----------------------------------- */

#define PG_READY_MAX 64

struct pg_waiter {
    int32_t epoll, timer;         /* descriptors of the epoll, and of the timerfd in it */
    int32_t bells;                /* descriptor of the epoll of rings in it; -1 = none */
    int32_t commits;              /* pg_group_commit_fd in it; -1 = none */
    int64_t set_boot_ns;          /* time to which the timer is set */
    uint32_t count;               /* number of descriptors in `ready` */
    int32_t ready[PG_READY_MAX];  /* readable descriptors, without the timer */
};
/* Sleep until a descriptor is readable, or until `until_boot_ns`; INT64_MIN = do not sleep. Returns
 * 0, or -1 with errno. */
int pg_wait(struct pg_waiter *w, int64_t until_boot_ns);

struct pg_loop {
    struct pg_waiter *waiter;     /* used unless the server has its own calls */
    struct pg_ring_server *server;
    struct pg_time_shares *shares;
    int64_t  spin_ns;             /* the caller wants to be awake this long before timers are due, and
                                     this long after a message */
    int64_t  late_ns;             /* an iteration that begins so much later than planned is left to
                                     the caller */
    uint32_t budget;              /* as in pg_advance */
    uint32_t most;                /* number of messages that an iteration applies */
    uint8_t  fires;               /* 1 = no socket wants notices, so due timers need no caller */
    /* results of pg_loop_wait */
    int64_t  begun_boot_ns;       /* begin of the last iteration; 0 = there was none */
    int64_t  planned_boot_ns;     /* latest time at which the next iteration was planned to begin */
    uint64_t iterations, wakeups;
};
/* Sleep as pg_wait does. Before and meanwhile do the iterations for messages of clients and, if `fires`,
 * for due timers, as long as no message, operation or outage needs the caller. Request commits, and
 * put the replies that waited for them. Only for an arena on the real clock, whose WAL buffer is not
 * full; `fires` only without a WAL. Returns 0, or -1 with errno. */
int pg_loop_wait(struct pg_arena *a, struct pg_loop *l, int64_t until_boot_ns);

/* ---- sleeping readers (futex.c): system calls on words of a mapping ------------------------ */

#define PG_SLEEP_WORDS 128 /* the kernel's FUTEX_WAITV_MAX */
/* Read the words, in order, before reading what they announce. */
void pg_look_at(uint32_t *const *words, uint32_t *values, uint32_t count);
/* Sleep until a word has another value than the given one or is woken, at most `limit_ns`. Returns 0,
 * or the errno: ETIMEDOUT, EINTR, or ENOSYS if the kernel is older than Linux 5.16. */
int pg_sleep(uint32_t *const *words, const uint32_t *values, uint32_t count, int64_t limit_ns);
/* Change a word and wake its sleepers. */
void pg_wake_all(uint32_t *word);
