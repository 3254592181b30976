/* layout.h - the one declaration of every shared byte of purgatoryd.
 *
 * The C core includes this file and cffi parses it. Python, the tables of the docs and every reader
 * of the wire derive their formats from it. It therefore uses only what cffi parses: literal
 * #defines, enums, fixed-width fields and explicit padding, with no include guard and no include.
 *
 * Rules for changes. Arena: moving a field or changing its meaning raises PG_ABI_MAJOR. Appending a
 * field to a struct, or adding a region or an extension kind, raises PG_ABI_MINOR; pg_convert fills
 * with zeros the fields and regions that an earlier minor version lacks. pg_convert copies regions
 * row by row, so a struct inside another struct or inside a blob cannot grow: new data there needs
 * its own region or extension kind. WAL: new record types and new parts behind a record raise
 * PG_WAL_MINOR; every other change raises PG_WAL_MAJOR. Wire: messages, flags and statuses may be
 * added; every other change raises PG_WIRE_VERSION. An example is a new field in a message of fixed
 * length such as pg_namespace_set. A reader accepts its own version and earlier minor versions, and
 * refuses every other version. The layout id in the header is computed from all sizes and offsets
 * below. So two builds with different layouts refuse each other even if no version number was
 * raised. Until the first release, all versions stay as they are.
 *
 * A comment that begins with "for" and a feature marks a reserved number or field, which is 0 or
 * absent until that feature exists. Fields named pad are 0 and align the fields after them.
 *
 * The byte order is the host's, which must be little endian; the magic number verifies this. Times
 * are int64 nanoseconds. *_wall_ns is CLOCK_REALTIME. *_boot_ns is CLOCK_BOOTTIME, or virtual time
 * under the virtual clock; a field marked "real clock" is CLOCK_BOOTTIME even under the virtual
 * clock. Offsets are bytes from the start of the arena file.
 *
 * There are two arena files. Only the daemon writes the ARENA, and clients map it read-only. (The
 * daemon's group-commit thread writes its own fields of the WAL buffer.) The PRIVATE arena file
 * (sessions, replies, hash secret) belongs to the daemon. "Authoritative" state survives a crash;
 * "derived" state is rebuilt from authoritative state at every attach. */

#define PG_MAGIC 0x31414e4552414750u     /* "PGARENA1" read as little endian */
#define PG_PRIVATE_MAGIC 0x3156495250474750u
#define PG_ABI_MAJOR 1
#define PG_ABI_MINOR 0

/* ---- limits -------------------------------------------------------------------- */

#define PG_KEY_MAX 255                   /* maximum length of a key in bytes */
#define PG_PAYLOAD_MAX 65536             /* maximum length of a payload in bytes */
#define PG_NAMESPACE_MAX 63              /* maximum length of a namespace's name in bytes */
#define PG_TOPIC_MAX 127                 /* maximum length of a topic's name in bytes */
#define PG_CAPACITY_MAX 134217728u       /* slots; an index entry then has 4 or more tag bits */
#define PG_TICKET_MAX 72057594037927935u /* 2^56 - 1 */
#define PG_TICKET_SHARD 281474976710656u /* 2^48; ticket = shard * 2^48 + number, number >= 1 */
#define PG_SHARDS_MAX 64                 /* maximum number of shards of a deployment */
#define PG_GRANULE 16                    /* size in bytes of the unit of blob references */
#define PG_BLOCK_GOAL 8192               /* granules; compaction keeps a free block of this size */
#define PG_NIL 4294967295u               /* means: no slot, no chunk, no blob or no uid */
#define PG_BATCH_RECORDS 1024            /* maximum number of records in one batch */
#define PG_BATCH_NAMES 256               /* maximum distinct namespace/topic pairs in one batch */
#define PG_MESSAGE_MAX 8388608           /* maximum length of a request or reply in bytes */
#define PG_WINDOW 4                      /* maximum number of unanswered batches of one session */
#define PG_WORKER_MAX 63                 /* maximum length of a client's own name in bytes */
#define PG_TAG_MAX 63                    /* maximum length of a timer's tag in bytes */
#define PG_ITEMS_MAX 1024                /* maximum length of a timer's extension items in bytes */
#define PG_UNIQUE_MAX_NS 31536000000000000 /* longest time for which a key stays unique: 365 days */
#define PG_CURSOR_MAX 63                 /* maximum length of a cursor's name in bytes */
#define PG_CURSOR_TOPICS 64              /* maximum number of topics in one CURSOR message */
#define PG_GRACE_MAX_NS 86400000000000   /* longest time a session outlives its client: 1 day */
#define PG_SLACK_MAX_NS 70368744177664   /* largest slack of a timer: 2^46 ns, 19.5 hours */
#define PG_QUOTA_MAX 281474976710655u    /* largest quota of timers or bytes: 2^48 - 1 */
#define PG_QUOTA_OPS_MAX 1000000000u     /* largest quota of operations per second */
#define PG_LATE_GRACE_MIN_NS 1000000     /* shortest grace of a late policy: 1 ms */
#define PG_LATE_GRACE_MAX_NS 2305843009213693951 /* longest grace of a late policy: 2^61 - 1 ns */
#define PG_LATE_PER_S_MAX 1000000000u    /* largest rate of a catch-up, in timers per second */
#define PG_LATE_PER_S 100000u            /* rate of a catch-up if the namespace sets none */
#define PG_BULK_LOAD_ROW_MAX 9223372036854775807u /* highest row number in a bulk load */
#define PG_WATCH_KEYS_MAX 1024           /* maximum number of watch keys of an operation */
#define PG_WATERMARK_MAX 9223372036854775807u /* largest watermark: 2^63 - 1 */
#define PG_TARGET_MAX 9223372036854775806u /* largest target of ALL, ANY and QUORUM: 2^63 - 2 */
#define PG_GROUP_NAME_MAX 63             /* maximum length of a consumer group's name in bytes */
#define PG_GROUP_TOPICS_MAX 64           /* maximum number of topics of a consumer group */
#define PG_GROUPS_MAX 4096               /* maximum number of consumer groups of an arena */
#define PG_ATTEMPTS_MAX 65535u           /* largest max_attempts of a consumer group */
#define PG_CREDITS_MAX 16384u            /* largest number of jobs that a member may hold */
#define PG_PRIORITY_MAX 9                /* the most urgent priority of a job */
#define PG_JOB_ERROR_MAX 1024            /* maximum length of a job's error text in bytes */
#define PG_GROUP_TIME_MAX_NS 31536000000000000 /* longest lease, delay and retention: 365 days */
#define PG_SCHEDULE_KEY_MAX 234          /* maximum length of a schedule's key in bytes */
#define PG_SPEC_MAX 255                  /* maximum length of a cron expression in bytes */
#define PG_ZONE_MAX 63                   /* maximum length of a time zone's name in bytes */
#define PG_NOMINAL_MAX 256               /* maximum number of nominal times in one reply */
#define PG_RESERVED 95                   /* '_': only PUBLISH may use names that begin with '_' */

/* ---- the arena header ----------------------------------------------------------- */

#define PG_REGION_ALIGN 4096             /* bytes; alignment of a region, unit of payload memory */

enum pg_region_id {
    PG_R_HOT, PG_R_COLD, PG_R_FREE_SLOTS, PG_R_WHEEL, PG_R_BUCKETS, PG_R_CHUNKS,
    PG_R_FREE_CHUNKS, PG_R_INDEX, PG_R_BLOB_HEAP, PG_R_BLOB_MAP, PG_R_BLOBS,
    PG_R_NAMESPACES, PG_R_TOPICS, PG_R_NAME_INDEX, PG_R_ACCOUNTS, PG_R_REPLAY_BUFFER,
    PG_R_METRICS, PG_R_PURGATORY, PG_R_WATCHES, PG_R_WATERMARKS, PG_R_WATERMARK_INDEX,
    PG_R_WAL_BUFFER,              /* has length 0 in an arena without a WAL */
    PG_R_TIMESTAMPS,              /* has length 0 in an arena without a WAL */
    PG_R_BULK_LOADS, PG_R_BULK_LOAD_BLOCKS, PG_R_BULK_LOAD_BITS, PG_R_BULK_LOAD_INDEX,
    PG_R_HISTOGRAMS,
    PG_R_BACKLOGS,
    PG_R_GROUPS, PG_R_GROUP_TOPICS, PG_R_MEMBERS, PG_R_JOBS, PG_R_FREE_JOBS, PG_R_JOB_INDEX,
    PG_R_ORDER_INDEX, PG_R_GROUP_CHANGE,
    PG_R_SCHEDULES,
    PG_R_CURSORS,                 /* has length 0 in an arena without cursors */
    PG_R_SWEEPS,                  /* PG_SWEEPS rows */
    PG_R_COUNT
};

enum pg_arena_state { PG_BLANK, PG_REBUILDING, PG_READY, PG_RETIRED };
enum pg_clock_kind {
    PG_CLOCK_BOOT,                /* CLOCK_BOOTTIME of the host */
    PG_CLOCK_VIRTUAL              /* virtual time, which only ADVANCE and the field at_ns of a BATCH
                                     move */
};

/* Phase of the daemon, independent of whether its arena can be read. A daemon that is killed leaves
 * its last phase in the header. */
enum pg_daemon_state {
    PG_D_STOPPED,                 /* has stopped cleanly and serves no requests */
    PG_D_STARTING,                /* takes its lock and binds its sockets */
    PG_D_RECOVERING,              /* attaches, rebuilds or creates the arena */
    PG_D_READY,                   /* serves requests, and nothing is degraded */
    PG_D_DEGRADED,                /* serves requests with restrictions; daemon_why has the reasons
                                     as bits of enum pg_degraded */
    PG_D_DRAINING                 /* refuses new timers and waits until no timer is armed */
};
/* Reasons for PG_D_DEGRADED; daemon_why is their sum. A draining daemon sets daemon_why as well. */
enum pg_degraded {
    PG_WHY_WAL = 1,               /* the WAL has stopped; nothing can be armed */
    PG_WHY_WAL_BUFFER = 2,        /* the disk is too slow; due timers wait for space in the WAL
                                     buffer */
    PG_WHY_LATE = 4,              /* the loop is late; due timers fire late */
    PG_WHY_TIMERS = 8,            /* nearly all timer slots are in use */
    PG_WHY_PAYLOADS = 16,         /* the payload memory is nearly full */
    PG_WHY_ARENA = 32,            /* the arena files were unlinked; nothing can be armed */
    PG_WHY_FRAGMENTED = 64,       /* enough payload memory is free, but only in small blocks that
                                     compaction could not join */
    PG_WHY_PAUSED = 128           /* the drain waits for due timers of paused topics */
};

struct pg_region {
    uint64_t offset;              /* offset in bytes from the start of the arena file */
    uint64_t length;      /* length in bytes; 0 = this arena has no such region */
    uint32_t stride;      /* size of one element in bytes */
    uint32_t count;       /* number of elements */
};

/* Parts of a placement. The fields `applied` and `clamped` of struct pg_placement are sums of
 * these. */
enum pg_placement_part {
    PG_PL_CPUS = 1,               /* the daemon's threads are bound to CPUs */
    PG_PL_MEMORY = 2,             /* the arena is on one NUMA node */
    PG_PL_REALTIME = 4,           /* the loop runs under SCHED_FIFO */
    PG_PL_LOCK = 8,               /* memory is locked into RAM */
    PG_PL_HUGE = 16,              /* the arena uses huge pages */
    PG_PL_SPIN = 32,              /* shortly before a deadline, the loop spins instead of
                                     sleeping */
    PG_PL_CORE = 64               /* the daemon chose the CPU core of its loop, and moves the loop
                                     if it finds a better core */
};
enum pg_placement_mode { PG_PLACE_NONE, PG_PLACE_AUTO, PG_PLACE_EXPLICIT, PG_PLACE_MODES };

/* Placement of the daemon. Nodes and CPUs are stored as 1 + the kernel's number; 0 = any. */
struct pg_placement {
    uint32_t mode;                /* enum pg_placement_mode */
    uint32_t node;                /* NUMA node of the daemon's threads */
    uint32_t memory_node;         /* NUMA node of the arena; a client with numa_local=True runs on
                                     this node */
    uint32_t reaper_cpu;          /* CPU of the loop; a client with numa_local=True avoids the core
                                     of this CPU */
    uint32_t applied;             /* parts in effect, bits of enum pg_placement_part */
    uint32_t clamped;             /* requested parts that were refused or only partly applied, bits
                                     of enum pg_placement_part */
    uint32_t pages_sampled;       /* number of arena pages whose NUMA node was looked up */
    uint32_t pages_elsewhere;     /* number of sampled pages on nodes other than memory_node */
};

/* The daemon writes the header, and every process may read it. Fields do not change after the start
 * of the daemon unless marked "moving", "authoritative" or "derived". */
struct pg_header {
    uint64_t magic;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint64_t layout_id;
    uint64_t length;              /* length of the arena file in bytes */
    uint32_t page_size;
    uint32_t clock_kind;          /* enum pg_clock_kind */
    uint8_t  uuid[16];            /* identity of this arena; the private arena file and the WAL
                                     contain it as well */
    uint8_t  boot_id[16];         /* id of the boot whose CLOCK_BOOTTIME the deadlines use */
    uint64_t stream_id;           /* identity of the notice streams; changes only if their
                                     continuity is lost */
    uint64_t epoch;               /* number of daemon starts */
    uint32_t shard;               /* number of this shard in the deployment; 0 without shards */
    uint32_t shards;              /* number of shards in the deployment; 1 without shards */
    uint32_t capacity;            /* slots */
    uint32_t replay_capacity;     /* number of entries of the replay buffer, a power of two */
    uint64_t payload_bytes;       /* length of the blob region in bytes */
    uint64_t replay_bytes_max;    /* maximum number of blob bytes that notices may keep in the
                                     replay buffer */
    uint64_t tick_ns;             /* length of a tick of the wheel */
    uint32_t fanout;              /* ratio of the bucket widths of two neighbouring rings of the
                                     wheel */
    uint32_t levels;              /* number of levels of the wheel */
    int64_t  created_wall_ns;
    int64_t  wall_origin_ns;      /* virtual clock: wall time at virtual time 0 */
    uint32_t daemon_pid;          /* moving: pid of the daemon since its start; 0 after a clean
                                     stop */
    uint32_t state;               /* moving, store-release: enum pg_arena_state */
    int64_t  heartbeat_boot_ns;   /* moving, real clock: time of the last heartbeat */
    uint64_t loop_iterations;     /* moving: number of loop iterations; it rises as long as the
                                     daemon makes progress */
    int64_t  now_ns;              /* moving: time of the last advance of the wheel, on the arena's
                                     clock */
    int64_t  next_deadline_ns;    /* moving: lower bound of the next deadline; INT64_MAX = nothing
                                     is armed */
    int64_t  wall_offset_ns;      /* moving: wall time = the arena's clock + this offset */
    uint64_t next_ticket;         /* authoritative: next ticket of this shard; a ticket is never
                                     reused */
    uint64_t replay_tail;         /* authoritative, store-release: replay buffer position after the
                                     newest entry */
    uint64_t replay_head;         /* authoritative: replay buffer position of the oldest entry that
                                     has not been withdrawn */
    uint64_t published;           /* authoritative: all replay buffer entries below this position
                                     were handed to the socket */
    uint64_t visible;             /* authoritative, store-release: readers take only replay buffer
                                     entries below this position; published <= visible <=
                                     replay_tail */
    uint32_t wake;                /* moving, store-release: futex; changes when a namespace is
                                     created, and with `state` */
    uint32_t pad_wake;
    uint64_t replay_bytes;        /* derived: number of blob bytes that replay buffer entries
                                     keep */
    uint64_t next_incarnation;    /* authoritative: incarnation that the next new topic gets */
    uint64_t quota_timers;        /* moving: number of timers that each uid may have armed, from the
                                     daemon's settings; 0 = no quota */
    uint64_t quota_bytes;         /* moving: number of blob bytes that the armed timers of each uid
                                     may use; 0 = no quota */
    uint64_t quota_ops;           /* moving: operations per second that each uid may request; 0 = no
                                     quota */
    uint32_t uid_share;           /* moving: percentage of each shared table that one uid may hold;
                                     0 or 100 = no limit */
    uint32_t own_uid;             /* moving: uid of the daemon; uid_share does not limit this uid */
    struct pg_placement placement; /* moving: requested and current placement */
    uint32_t daemon_state;        /* moving, store-release: enum pg_daemon_state */
    uint32_t daemon_why;          /* moving: bits of enum pg_degraded; written before
                                     daemon_state */
    int64_t  daemon_since_boot_ns; /* moving: time of the last change of daemon_state, on the real
                                      clock; written before daemon_state */
    uint64_t term;                /* for replication: the leader's term; 0 without replication */
    struct pg_region regions[40]; /* the first PG_R_COUNT elements are in use; the others are for
                                     later minor versions */
    uint64_t version;             /* PG_MAGIC; written last at creation, when the arena is
                                     complete */
};

/* Counters since the creation of the arena. Only counters marked "derived" are rebuilt at an
 * attach. The daemon writes the counters, and every process may read them. */
struct pg_metrics {
    uint64_t adds;                /* timers armed, replacements included */
    uint64_t replaces;            /* timers that replaced an armed timer */
    uint64_t extends;             /* timers moved to a later deadline */
    uint64_t cancels;             /* CANCELs of an armed timer */
    uint64_t cancels_fired;       /* CANCELs of a timer that had fired before */
    uint64_t cancels_unknown;     /* CANCELs of a key without a timer */
    uint64_t expiries;            /* timers that fired */
    uint64_t notices_withdrawn;   /* entries removed from the replay buffer to make space */
    uint64_t refused_full;        /* refusals: no free slot */
    uint64_t refused_payload;     /* refusals: no space for the blob */
    uint64_t refused_names;       /* refusals: no free row for a namespace or a topic */
    uint64_t refused_other;       /* refusals that no other counter counts */
    uint64_t batches;             /* batches applied */
    uint64_t batches_repeated;    /* batches sent again and answered from the reply memory */
    uint64_t batches_refused;     /* messages refused as a whole */
    uint64_t records;             /* records of applied batches */
    uint64_t live;                /* derived: armed timers and armed operations */
    uint64_t live_wall;           /* derived: armed or parked timers with an absolute wall
                                     deadline */
    uint64_t blob_bytes;          /* derived: blob bytes in use, whole granules */
    uint64_t moved;               /* timers moved to another bucket by cascades and gradual
                                     draining */
    uint64_t wakeups;             /* wakeups of the loop */
    uint64_t messages_sent;       /* notice messages handed to the socket */
    uint64_t watches;             /* operations armed */
    uint64_t operations;          /* derived: armed operations */
    uint64_t outcomes;            /* derived: ended operations whose outcome has not been
                                     acknowledged */
    uint64_t satisfied;           /* operations whose condition came true */
    uint64_t expired;             /* operations that timed out; `expiries` counts timers */
    uint64_t failed;              /* operations that failed because a watch key failed */
    uint64_t cancelled;           /* operations cancelled by CANCEL with their own key, or by
                                     CANCEL_FOR_KEY */
    uint64_t already_true;        /* operations whose condition was found true only at their
                                     deadline */
    uint64_t checks;              /* CHECKs sent to owners of operations with condition CLIENT */
    uint64_t advances;            /* number of times that a watermark rose */
    uint64_t visits;              /* watchers visited by advances, failures and cancels of watch
                                     keys */
    uint64_t refused_busy;        /* refusals: the owner's inbox is full, the replay buffer is full
                                     of unsent notices, or compaction has to make space */
    uint64_t refused_keys;        /* refusals: no free row for a watch key or a watch record */
    uint64_t refused_denied;      /* refusals: the namespace has another owner, or the name is
                                     reserved */
    uint64_t refused_quota;       /* refusals: a quota or share is used up, or no account row is
                                     free */
    uint64_t refused_wal;         /* refusals: the WAL buffer was too full, or the WAL has
                                     stopped */
    uint64_t bulk_loads;          /* derived: bulk loads that the arena remembers */
    uint64_t bulk_load_blocks;    /* derived: blocks of bulk load rows in use */
    uint64_t bulk_load_rows;      /* bulk load rows that were marked as done */
    uint64_t bulk_load_rows_repeated; /* bulk load rows that were sent again */
    uint64_t refused_bulk_loads;  /* refusals: no free row for a bulk load, or no free block for its
                                     rows */
    uint64_t refused_fenced;      /* refusals: rows of a closed bulk load, or of a run that is not
                                     the newest run */
    uint64_t parked;              /* derived: parked timers; only the WAL has their payloads */
    uint64_t parks;               /* timers that were parked when they were added */
    uint64_t unparks;             /* parked timers that UNPARK armed with their payload */
    uint64_t iterations;          /* number of advances of the wheel */
    uint64_t iterations_full;     /* advances of the wheel that used up their budget */
    uint64_t outcomes_repeated;   /* outcomes and CHECKs that were sent again because no
                                     acknowledgement came */
    uint64_t records_redone;      /* WAL records redone when the arena was recovered */
    uint64_t refused_exists;      /* refusals because the key is armed: of a WATCH, or of a PUT
                                     with mode ERROR */
    uint64_t refused_stopping;    /* refusals: PUT or WATCH while the daemon drains */
    uint64_t iteration_work;      /* timers moved or fired by advances of the wheel that had work */
    uint64_t iteration_budget;    /* sum of the budgets of the wheel advances that had work */
    uint64_t log_dropped;         /* log messages that were discarded */
    uint64_t outcomes_dropped;    /* outcomes freed because their owner's session had ended */
    uint64_t largest_free_bytes;  /* derived: a key and payload of this length fit into the largest
                                     free block, which is at most 3 % longer */
    uint64_t compactions;         /* passes that moved blobs to join free blocks */
    uint64_t compacted_bytes;     /* bytes of moved blobs, whole granules */
    uint64_t backlog;             /* derived: due timers that have not fired, because they are
                                     paused or because the daemon catches up */
    uint64_t skipped;             /* timers that ended without a notice, by policy or overlap SKIP,
                                     and occurrences of schedules whose key stays unique */
    uint64_t coalesced;           /* late timers that ended without a notice of their own, by policy
                                     COALESCE */
    uint64_t jobs;                /* derived: jobs of all consumer groups, dead letters included */
    uint64_t jobs_born;           /* jobs that began when a timer fired, an operation ended or a
                                     notice was published */
    uint64_t jobs_leased;         /* leases given to members of consumer groups */
    uint64_t jobs_acked;          /* jobs that a member acknowledged */
    uint64_t jobs_retried;        /* attempts that failed and are followed by another attempt */
    uint64_t jobs_expired;        /* leases that expired, or whose member ended */
    uint64_t jobs_dead;           /* jobs that became dead letters */
    uint64_t jobs_dropped;        /* jobs and dead letters that were removed unfinished */
    uint64_t refused_group;       /* refusals: the budget of a consumer group is used up */
    uint64_t reschedules;         /* timers that sweeps moved to another deadline */
    uint64_t sweeps;              /* sweeps that began */
    uint64_t schedules;           /* derived: schedules that the arena has */
    uint64_t schedules_armed;     /* derived: schedules whose next occurrence is armed */
    uint64_t occurrences;         /* occurrences of schedules that were armed */
    uint64_t refused_schedules;   /* refusals: no free row for a schedule, or no time that its spec
                                     names */
    uint64_t cursors;             /* derived: cursors of subscribers */
    uint64_t cursor_rows;         /* derived: rows in use for cursors and their positions */
    uint64_t cursor_commits;      /* positions that cursors committed, and deleted cursors */
    uint64_t refused_cursors;     /* refusals: another session holds the cursor, or no row is free
                                     for a cursor, a position or a topic */
    uint64_t unique_keys;         /* derived: keys that stay unique after the end of their timers */
    uint64_t unique_freed;        /* keys that stayed unique until their time was over */
};

/* ---- histograms ----------------------------------------------------------------- */

/* Histograms of durations in nanoseconds. */
enum pg_histogram_id {
    PG_HG_STRUCTURAL_LATENESS,    /* from the deadline of a timer or an operation, rounded up to a
                                     multiple of its slack, until it fires */
    PG_HG_WAKEUP_LATENESS,        /* from the time at which the loop had to wake up until it ran */
    PG_HG_BATCH_SERVICE,          /* from the start of a batch's application until its reply is
                                     built */
    PG_HG_REQUEST_QUEUE,          /* from the receipt of a batch until its application starts */
    PG_HG_LOCAL,                  /* time that the loop worked on a batch, summed over all its calls
                                     of pg_handle */
    PG_HG_REMOTE,                 /* from the arming of a timer or an operation until it ends */
    PG_HG_RESPONSE_QUEUE,         /* from the time at which a timer or an operation ended, a notice
                                     was published, or a reply was built, until the sending of its
                                     message starts */
    PG_HG_SEND,                   /* from the start of sending until the socket took the message */
    PG_HISTOGRAMS
};

/* Bucket b < 16 counts the value b. Above that, each power of two has eight buckets: with s = b / 8
 * - 1 and m = b - 8 * s, bucket b counts the values from m << s to ((m + 1) << s) - 1. So the end
 * of a bucket is at most an eighth above any of its values. */
#define PG_HISTOGRAM_BUCKETS 488         /* number of buckets; the last bucket ends at 2^63 - 1 */

/* Counts since the creation of the arena; they cannot be rebuilt. The daemon writes the fields and
 * every process may read them. There is no memory order between the fields. */
struct pg_histogram {
    uint64_t sum_ns;              /* low half of the sum of all values: the sum modulo 2^64 */
    uint64_t sum_high;            /* high half of the sum of all values: the sum divided by 2^64 */
    uint64_t max_ns;              /* largest value */
    uint64_t counts[488];
};

/* ---- timers --------------------------------------------------------------------- */

/* States of a slot: the low 8 bits of its control word.
 *
 * Timer: FREE -> ARMED (put) -> FREE (cancelled, or fired once its replay buffer entry is written);
 * FREE -> PARKED (put with a distant deadline) -> ARMED (unpark) or FREE (cancelled). A parked
 * timer has only its key in the arena: it is in no bucket of the wheel, and its payload is in the
 * WAL. A timer with PG_EXT_UNIQUE that fires, is skipped or is coalesced before the time of this
 * item: ARMED -> UNIQUE (its key stays unique) -> FREE (at the time of the item). */
enum pg_slot_state { PG_S_FREE, PG_S_ARMED, PG_S_OUTCOME, PG_S_PARKED, PG_S_UNIQUE };
/* Operation: FREE -> ARMED (watch) -> OUTCOME (ended) -> FREE (acknowledged). */

enum pg_slot_flag {
    PG_F_WALL = 1,                /* the deadline is an absolute wall time, stored in the blob's
                                     extension */
    PG_F_EXT = 2,                 /* the blob begins with extension items */
    PG_F_OPERATION = 4,           /* a purgatory operation; the blob begins with struct
                                     pg_operation */
    PG_F_BULK_LOADED = 8,         /* the timer was put as a row of a bulk load */
    PG_F_SCHEDULE = 16            /* the timer is an occurrence of a schedule, and the blob's
                                     extension has a PG_EXT_SCHEDULE */
};
#define PG_SLACK_SHIFT 8          /* pg_hot.flags >> PG_SLACK_SHIFT: log2 of the timer's slack in
                                     ns. The timer fires when its deadline, rounded up to a multiple
                                     of the slack, has passed */

/* The first part of a slot: 32 bytes, two per cache line. It is a seqlock with `ctl` as its
 * counter. The daemon writes the other fields first and ctl last (store-release). Readers read ctl
 * with acquire order, copy the slot, and trust the copy only if ctl has not changed. */
struct pg_hot {
    uint64_t ctl;                 /* control word: ticket << 8 | enum pg_slot_state */
    int64_t  deadline_ns;         /* deadline on the arena's clock */
    uint32_t where;               /* derived: place in the wheel: chunk * 16 + cell */
    uint16_t bucket;              /* derived: bucket in the wheel */
    uint16_t flags;               /* enum pg_slot_flag, and the slack above PG_SLACK_SHIFT */
    uint32_t hash;                /* keyed hash of namespace, key type and key */
    uint16_t topic;               /* row of the topic; that row names the namespace */
    uint16_t wait_low;            /* low half of the time from arming to deadline, see struct
                                     pg_cold */
};

/* The second part of a slot: 16 bytes at the same index as pg_hot, written before hot.ctl.
 * wait_high and wait_low are the halves of a float, which is the number of nanoseconds from the
 * arming of the timer to its deadline. Readers compute the time of arming from this float. Every
 * bit pattern is valid. */
struct pg_cold {
    uint32_t blob;                /* first granule of the blob, which holds extension, key and
                                     payload */
    uint32_t payload_len;         /* length of the payload in bytes, 0..65536 */
    uint8_t  key_len;             /* length of the key in bytes, 1..255 */
    uint8_t  key_type;            /* enum pg_key_type */
    uint16_t ext_len;             /* length of the extension in bytes, a multiple of 16 */
    uint16_t account;             /* 1 + row of the account to which the slot is charged; 0 =
                                     none */
    uint16_t wait_high;           /* high half of the time from arming to deadline */
};

/* Origin of an armed timer or operation. Authoritative; only in an arena with a WAL. Stored at the
 * slot's index and written before hot.ctl. This struct is the last part of the WAL record of the
 * arming, and of the WAL record of the end. 56 bytes. */
struct pg_timestamps {
    uint64_t add_lsn;             /* LSN of its ARM or WATCH record; 0 = unknown */
    uint64_t session;             /* session that armed it; 0 = no message armed it */
    int64_t  sent_boot_ns;        /* time at which the client packed the batch, on the client's
                                     clock; 0 = not reported */
    int64_t  received_boot_ns;    /* real clock: time at which the daemon took the batch from the
                                     socket; 0 = no batch */
    int64_t  applied_boot_ns;     /* real clock: time at which the daemon began to apply the
                                     batch */
    int64_t  armed_ns;            /* time of arming, on the arena's clock */
    int64_t  done_boot_ns;        /* real clock: time at which the call that armed the timer or
                                     operation returned; 0 = unknown. The WAL record of the arming
                                     always has 0. Only for metrics */
};

enum pg_key_type {
    PG_KEY_STR,                   /* UTF-8 text */
    PG_KEY_BYTES,                 /* any bytes */
    PG_KEY_UUID,                  /* 16 bytes */
    PG_KEY_TYPES
};

/* One item of a blob's extension, 16 bytes, for properties that few timers have. The items are in
 * ascending order of their kinds, at most one of each kind. PG_EXT_WALL comes from the deadline; a
 * PUT carries the other items, and its WAL records repeat them. A replay buffer entry and a notice
 * have no items. */
enum pg_ext_kind {
    PG_EXT_WALL = 1,              /* value: the wall deadline, ns */
    PG_EXT_TAG,                   /* extra: length of the tag in bytes, 1..PG_TAG_MAX; value: 0. The
                                     tag follows as UTF-8, padded with zeros to a multiple of 16 */
    PG_EXT_SCHEDULE,              /* only from the daemon. value: nominal time of the occurrence, wall
                                     clock, ns; extra: row of the schedule, PG_NIL = a trigger or a
                                     backfill armed it */
    PG_EXT_PRIORITY,              /* extra: priority of the timer's jobs, 0..PG_PRIORITY_MAX; value:
                                     0 */
    PG_EXT_ORDER,                 /* value: hash of the order key of the timer's jobs; clients use
                                     the first 8 bytes of its SHA-256, little-endian; extra: 0 */
    PG_EXT_LATE,                  /* the timer's own late policy. extra: enum pg_late_policy; value:
                                     its grace in ns, as in struct pg_topic_set */
    PG_EXT_UNIQUE                 /* until when no other timer may get the key. A PUT gives the time
                                     from the arming as value, 1..PG_UNIQUE_MAX_NS, and 0 as extra.
                                     A blob, a pg_info and the WAL have the time on the arena's
                                     clock as value, and the length of the key as extra; the key
                                     follows, padded with zeros to a multiple of 16 */
};
#define PG_EXT_KINDS 8            /* all kinds are below */
struct pg_ext {
    uint32_t kind;                /* enum pg_ext_kind */
    uint32_t extra;               /* meaning by kind; else 0 */
    int64_t  value;               /* meaning by kind; else 0 */
};

/* ---- the wheel (derived) -------------------------------------------------------- */

#define PG_WHEEL_LEVELS 64
#define PG_DUE_BUCKETS 3         /* number of buckets for due timers; they follow all rings */
#define PG_BACKLOG_BUCKET 65535u /* pg_hot.bucket of a timer in the backlog of its topic */
#define PG_CHUNK_CELLS 15

struct pg_chunk {                 /* one cache line; a bucket is a chain of chunks */
    uint32_t previous;            /* cell of the bucket's tail before this chunk; PG_NIL = none. In
                                     a backlog: the next chunk */
    uint32_t slots[15];
};

struct pg_bucket {
    uint32_t tail;                /* cell of the newest member, chunk * 16 + 1..15; PG_NIL = empty
                                     bucket */
    uint32_t count;               /* members */
};

/* The backlog of a topic: due timers that wait in the order in which they came due, because the
 * topic is paused or because the daemon catches up. A chain of chunks from the oldest to the newest
 * member. Derived. 16 bytes. */
struct pg_backlog {
    uint32_t head;                /* cell of the oldest member; PG_NIL = empty */
    uint32_t tail;                /* cell of the newest member */
    uint32_t count;               /* members */
    uint32_t pad;
};

/* A ring of 2 x fanout buckets, each `width` ticks wide. One half is the block of buckets that
 * contains the clock; the other half is the next block. In level 0 a bucket is one tick wide. */
struct pg_level {
    uint64_t limit;               /* lowest tick that this level does not reach */
    uint64_t origin;              /* tick of position 0, in the ring's current revolution */
    uint64_t start;               /* first tick of the bucket that contains the clock */
    uint64_t width;               /* number of ticks of a bucket: fanout ^ level */
    uint64_t multiplier;          /* multiplier and shift replace a division by width */
    uint32_t shift;
    uint32_t first;               /* index of the bucket at position 0 */
    uint64_t summary;             /* bit i is set if occupied[i] is not 0 */
    uint64_t occupied[8];         /* one bit per position, set if the bucket there has members */
    uint32_t here;                /* position of the bucket that contains the clock */
    uint32_t pad;
};

/* The timer wheel. PG_DUE_BUCKETS buckets for due timers follow the buckets of all rings. Two of
 * them hold timers that were due when they were added: one bucket takes new timers while the other
 * bucket is being fired. The third holds due operations whose expiry is delayed after an outage. */
struct pg_wheel {
    uint64_t clock;               /* tick whose bucket is being fired, or was fired last */
    uint64_t drained;             /* tick up to which coarse buckets have been drained gradually */
    uint64_t occupied;            /* bit l: level l has members */
    uint64_t moved;               /* timers moved to a finer level since the wheel was
                                     initialised */
    int64_t  tick_ns;
    uint64_t multiplier;          /* multiplier and shift replace a division by tick_ns */
    uint32_t shift;
    uint32_t ring;                /* number of buckets of one level: 2 x fanout */
    uint32_t level_count;
    uint32_t due;                 /* index of the first bucket for due timers */
    uint32_t open;                /* bucket for due timers that takes new timers: 0 or 1 */
    uint32_t closing;             /* 1 = of the buckets for due timers 0 and 1, the one that is not
                                     `open` belongs to the current tick and may have members */
    uint32_t chunk_count;
    uint32_t backlog;             /* members of all backlogs */
    struct pg_level levels[64];
};

/* ---- blobs (their bytes are authoritative; heap and map are derived) --------------------- */

/* Size classes of free blocks: 28 first levels, one per power of two, with 32 equal steps each.
 * Blocks below 64 granules have one class per size. */
#define PG_BLOB_FIRST_LEVELS 28
#define PG_BLOB_CLASSES 896

struct pg_blob_heap {
    uint32_t first;               /* bit f is set if second[f] != 0 */
    uint32_t used;                /* number of granules in use */
    uint32_t free_blocks;
    uint32_t second[28];          /* bit s of second[f] is set if heads[f * 32 + s] != PG_NIL */
    uint32_t heads[896];          /* first free block of each class; PG_NIL = none */
    uint32_t passes;              /* rises before the memory of moved blobs may be used again */
};

/* Content of a free block: size, next and previous in its first granule, size_at_end in its last
 * granule, which may be the same granule. Readers never look at free blocks. */
struct pg_blob_free {
    uint32_t size;                /* granules */
    uint32_t next;                /* next free block of the same class; PG_NIL = none */
    uint32_t previous;
    uint32_t size_at_end;
};

/* ---- the key index (derived) ----------------------------------------------------- */

#define PG_INDEX_CELLS 15

/* A bucket of the key index, one cache line. An id is a slot, or capacity + ring position of a
 * replay buffer entry. A cell holds id + 1; the bits above it hold a tag, which is as many bits of
 * the hash as the cell has space for. A cell with value 0 is empty. */
struct pg_index_bucket {
    uint32_t overflowed;          /* number of ids that belong here but are in a later bucket
                                     because this bucket was full */
    uint32_t cells[15];
};

/* ---- the purgatory ----------------------------------------------------------------- */

/* A watch key: its monotone watermark, and its watchers, in a treap ordered by the watermark that
 * each watcher waits for. Authoritative except root, first, latest and place. 64 bytes. */
struct pg_watermark {
    uint64_t watermark;           /* current value of the watermark; stored (release) before any
                                     watcher is visited */
    uint8_t  key[16];             /* the key, or, if the key is longer than 16 bytes, the granule
                                     (u32) of its blob. Free row: hints for prefetching, namely the
                                     rows (u32 each) that follow the next free row in the free
                                     list */
    uint32_t hash;
    uint32_t error;               /* error code of the key's failure until the failure is cleared; 0
                                     = not failed */
    uint32_t root;                /* derived: root of the treap; free row: the next free row */
    uint32_t first;               /* derived: watcher with the lowest target */
    uint32_t latest;              /* derived: watcher with the highest target; new watchers with
                                     rising targets start here */
    uint32_t touched_s;           /* real clock, seconds: time of the last change, or of the
                                     departure of the last watcher. PG_NIL = the key was forgotten:
                                     it is removed when its last watcher leaves, even if other
                                     operations start to watch it before then */
    uint16_t namespace_row;
    uint8_t  key_len;             /* length of the key in bytes; 0 = unused row; written last */
    uint8_t  key_type;
    uint32_t place;               /* derived: the key's place in the watermark index: bucket * 16 +
                                     cell */
    uint16_t account;             /* account of the uid whose record created the key, stored as in
                                     pg_cold */
    uint8_t  pad[6];
};

/* A watch record: one key of one operation. Authoritative are key_row, slot and sibling, and for
 * ALL, ANY and QUORUM also target (read by watch_target()). */
struct pg_watch {
    uint64_t target;              /* value of the watermark at which this watcher is visited */
    uint32_t key_row;             /* row of the watch key */
    uint32_t slot;                /* slot of the operation; PG_NIL = unused record */
    uint32_t left, right, parent; /* derived: links of the treap; free record: hints for
                                     prefetching */
    uint32_t sibling;             /* record of the operation's next key; free record: the next free
                                     record */
};

/* Derived: heads and lengths of the free lists. */
struct pg_purgatory {
    uint32_t free_watch, free_watches;
    uint32_t free_watermark, free_watermarks;
    uint64_t watermark_ttl_ns;    /* time on the real clock for which a watch key without watchers
                                     is remembered; fixed at creation */
    uint64_t inbox_max;           /* maximum number of operations that a session may own, armed or
                                     with an unacknowledged outcome; fixed at creation */
};

enum pg_condition {
    PG_C_ALL,                     /* each key reaches its target */
    PG_C_ANY,                     /* at least one key reaches its target */
    PG_C_SUM,                     /* the gains of the keys, each limited by a cap, together reach a
                                     sum */
    PG_C_CLIENT,                  /* the owner decides: it receives a CHECK whenever a key has
                                     advanced */
    PG_C_QUORUM,                  /* a given number of keys reach their targets */
    PG_CONDITIONS
};
enum pg_check_state { PG_K_NONE, PG_K_ASKED, PG_K_MOVED };

/* The first 80 bytes of an operation's blob. Three parts follow, which are filled in when the
 * operation ends: a uint64_t watermark per key, a bitmap of missing keys and a bitmap of failed
 * keys. The rest is, in this order: a bitmap of the operation's own keys if it has any, zeros up to
 * a multiple of 16 bytes, for SUM a struct pg_share per key, the operation's key, and the payload.
 * A bitmap has (keys + 7) / 8 bytes, and bit n is the n-th key. */
struct pg_operation {
    uint64_t session;             /* session of the owner */
    uint64_t threshold;           /* SUM: the sum; QUORUM: number of keys that have to reach their
                                     targets */
    int64_t  armed_ns;            /* time of arming, on the arena's clock */
    int64_t  ended_ns;            /* time at which the operation ended, on the arena's clock */
    uint64_t version;             /* CLIENT: version of the last CHECK. The upper half comes from
                                     the ticket, so that a late answer never matches a later
                                     operation with the same key */
    uint32_t first_watch;         /* first record of its chain of watch records */
    uint32_t notice_blob;         /* blob of its notice (key, verdict, payload); PG_NIL = no notice
                                     was requested */
    uint32_t inbox_next, inbox_previous; /* derived: slots of the neighbours in the inbox */
    uint32_t error;               /* error code of the key that failed; 0 = none failed */
    uint32_t unmet;               /* derived, ALL and QUORUM: number of keys that still have to
                                     reach their targets before the condition is true */
    uint16_t keys;
    uint8_t  condition;           /* enum pg_condition */
    uint8_t  cause;               /* enum pg_cause of the end; 0 = the operation is armed */
    uint8_t  check;               /* enum pg_check_state */
    uint8_t  in_inbox;            /* derived: 1 = the operation is in its owner's inbox */
    uint8_t  has_own;             /* 1 = the blob contains a bitmap of own keys */
    uint8_t  notified;            /* 1 = its outcome was handed to the owner's socket */
    uint32_t uid;                 /* uid of the owner; PG_NIL = unknown */
    uint8_t  pad[4];              /* pads the struct to whole granules */
};

struct pg_share {                 /* one key of a SUM; its gain is min(cap, max(0, watermark -
                                     base)) */
    uint64_t base;
    uint64_t cap;
};

/* First bytes of the payload of an operation's notice (PG_E_OPERATION). The bitmap of missing keys
 * and the operation's own payload follow. */
struct pg_verdict {
    int64_t  elapsed_ns;          /* time in ns from the arming to the end of the operation */
    uint32_t error;               /* error code of the key that failed; 0 = none failed */
    uint16_t keys;                /* number of watch keys */
    uint16_t bitmap_bytes;        /* length in bytes of the bitmap of missing keys, which follows */
};

/* ---- names ---------------------------------------------------------------------- */

/* Token bucket for a quota of operations per second. An empty bucket fills in one second. A start
 * of the daemon does not preserve the tokens: the bucket is full after every start. */
struct pg_tokens {
    uint64_t left;                /* number of tokens that are left, in units of 10^-9 operations */
    int64_t  refilled_boot_ns;    /* real clock: time at which `left` was computed; 0 = the bucket
                                     is full */
};

/* A namespace. Authoritative. Its row is never freed, and its name never changes. */
struct pg_namespace {
    uint32_t name_len;            /* length of the name in bytes; 0 = unused row; written last,
                                     store-release */
    uint32_t shard;               /* shard of the namespace, recorded at creation */
    uint32_t owner_uid;           /* uid that owns the namespace; PG_NIL = anybody may use it */
    uint32_t durability;          /* 0 = changes are only in memory, 1 = changes are durable */
    uint64_t live;                /* derived: number of armed or parked timers plus number of armed
                                     operations */
    uint64_t bytes;               /* derived: number of blob bytes of the timers and operations that
                                     `live` counts */
    uint64_t quota_timers;        /* number of timers that may be armed; 0 = no quota */
    uint64_t quota_bytes;         /* number of blob bytes that its timers and operations may use; 0
                                     = no quota */
    uint64_t quota_ops;           /* maximum number of operations per second; 0 = no quota */
    struct pg_tokens tokens;
    uint64_t park_beyond_ns;      /* timers with a longer delay than this are parked; 0 = no timer
                                     is parked */
    uint64_t late_per_s;          /* maximum number of late timers that fire per second while the
                                     daemon catches up; 0 = PG_LATE_PER_S */
    int64_t  caught_up_ns;        /* derived: time by which the late timers fired so far would have
                                     fired at this rate; on the arena's clock */
    uint32_t paused;              /* 1 = its timers fall due without firing */
    uint32_t pad;
    uint32_t created_uid;         /* uid whose record or message created it; PG_NIL = unknown */
    uint32_t wake;                /* moving, store-release: futex; low half of `visible` when
                                     notices of the namespace last became visible */
    char     name[64];
};

enum pg_late_policy {             /* end of a timer that would fire later than its grace allows */
    PG_LATE_FIRE,                 /* the timer fires late */
    PG_LATE_SKIP,                 /* the timer ends without a notice */
    PG_LATE_COALESCE,             /* only the last of successive such timers of a topic fires */
    PG_LATE_POLICIES
};
#define PG_LATE_SHIFT 2           /* pg_topic.late: grace in ns << PG_LATE_SHIFT | enum
                                     pg_late_policy; 0 = PG_LATE_FIRE */

/* A topic. Authoritative. `sequence` counts the topic's notices. It is stored after `commit` of the
 * newest replay buffer entry. `commit` alone decides whether the notice exists; a rebuild sets
 * `sequence` to that of the newest committed entry. */
struct pg_topic {
    uint32_t name_len;            /* 1 + length of the name in bytes; 0 = unused row; written last,
                                     store-release */
    uint32_t namespace_row;
    uint64_t incarnation;         /* identity of the topic, different for all topics that ever used
                                     this row */
    uint64_t sequence;            /* sequence number of the newest notice; the first notice has 1 */
    uint64_t last_position;       /* 1 + replay buffer position of the newest notice; 0 = none */
    int64_t  changed_boot_ns;     /* real clock: time of the newest notice */
    uint64_t live;                /* derived: number of armed or parked timers plus number of armed
                                     operations */
    int64_t  slack_ns;            /* slack of new timers whose PUT gives none, ns; the row of a
                                     topic with a slack is not reused */
    uint64_t late;                /* late policy and its grace, see PG_LATE_SHIFT; the row of a
                                     topic with another policy than FIRE is not reused */
    uint64_t missed;              /* timers that were coalesced since the topic's last timer
                                     fired */
    uint64_t coalescing;          /* timer that is being coalesced: ticket << 8 | low byte of the
                                     value that `missed` will have; 0 = none */
    uint64_t carried;             /* sequence of the last notice that was sent before a resharding
                                     or a recovery from the WAL, and that stays in the replay
                                     buffer for cursors; other subscribers begin after it */
    uint32_t paused;              /* 1 = its timers fall due without firing; the row of a paused
                                     topic is not reused */
    uint32_t unique_keys;         /* derived: keys that stay unique after the end of their timers;
                                     if there are any, the row is not reused */
    uint32_t created_uid;         /* as in pg_namespace */
    uint32_t wake;                /* moving, store-release: futex; changes when notices of the
                                     topic become visible, and when another topic gets the row */
    char     name[128];
    uint64_t bytes;               /* derived: number of blob bytes of the timers and operations that
                                     `live` counts */
    uint32_t groups;              /* derived: 1 + first row of PG_R_GROUP_TOPICS of the topic; 0 = no
                                     consumer group has the topic, and its row may be reused */
    uint32_t priority;            /* priority of jobs whose timers give none; the row of a topic
                                     with a priority is not reused */
};

/* The account of a uid that has sessions, timers or watch keys. Authoritative except for its counts
 * and tokens. If the uid has none of these left, its row may be given to another uid. */
struct pg_account {
    uint32_t uid;
    uint32_t in_use;              /* 0 = unused row; written last */
    uint64_t live;                /* derived: number of armed or parked timers plus number of armed
                                     operations */
    uint64_t bytes;               /* derived: number of blob bytes of the timers and operations that
                                     `live` counts */
    struct pg_tokens tokens;
    int64_t  used_boot_ns;        /* real clock: time at which the uid last sent a batch or opened a
                                     session */
    uint32_t sessions;            /* derived: number of open sessions */
    uint32_t watch_keys;          /* derived: number of watch keys that the uid's records created */
    uint32_t watches;             /* derived: number of watch records of the uid's armed
                                     operations */
    uint32_t operations;          /* derived: number of operations of the uid's open sessions, armed
                                     or with an unacknowledged outcome */
};

/* ---- bulk loads ---------------------------------------------------------------------- */

#define PG_BULK_LOAD_BLOCK_ROWS 4096

enum pg_bulk_load_state {
    PG_BULK_LOAD_NONE,            /* there is no such bulk load */
    PG_BULK_LOAD_OPEN,            /* accepts rows */
    PG_BULK_LOAD_CLOSED           /* accepts no more rows */
};

/* A bulk load. It records which of its rows are done and must not be added again, even if their
 * timers are gone. Authoritative except for the fields marked "derived". 64 bytes. */
struct pg_bulk_load {
    uint8_t  id[16];              /* id chosen by the client; not 0 */
    uint64_t fencing_token;       /* fencing token of the newest run; rows of older runs are
                                     refused */
    int64_t  used_boot_ns;        /* real clock: last use */
    uint64_t rows;                /* derived: number of rows that are done */
    uint64_t upto;                /* derived: 1 + number of the highest row that is done */
    uint32_t uid;                 /* uid that began it; only this uid may continue it */
    uint32_t namespace_row;
    uint32_t state;               /* enum pg_bulk_load_state; NONE = unused row; written last */
    uint32_t blocks;              /* derived: number of blocks that its rows use */
};

/* A block of PG_BULK_LOAD_BLOCK_ROWS rows of a bulk load; `number` * PG_BULK_LOAD_BLOCK_ROWS is its
 * first row. Authoritative. Its bits, one per row, are in PG_R_BULK_LOAD_BITS at the same index; a
 * bit is set after its row has taken effect. 16 bytes. */
struct pg_bulk_load_block {
    uint64_t number;              /* number of the block within the bulk load; free block: the next
                                     free block */
    uint32_t bulk_load;           /* 1 + row of the bulk load; 0 = free block; written last */
    uint32_t pad;
};

/* ---- selections and sweeps ---------------------------------------------------------------- */

enum pg_select_field {
    PG_SEL_PREFIX = 1,            /* only timers whose key has the type `key_type` and begins with
                                     the prefix */
    PG_SEL_TOPIC = 2,             /* only timers of the topic */
    PG_SEL_TAG = 4                /* only timers with the tag */
};
#define PG_SEL_FIELDS 8           /* all sums of these flags are below */

/* A part of the armed and parked timers of a namespace, without operations. */
struct pg_select {                /* 32 bytes, then namespace, prefix, topic and tag */
    int64_t  from_ns;             /* lowest deadline, on the arena's clock */
    int64_t  upto_ns;             /* only earlier deadlines; INT64_MAX = all */
    uint64_t tickets;             /* only tickets with a lower number; 0 = all timers that are armed
                                     when the daemon handles the message */
    uint8_t  fields;              /* sum of flags of enum pg_select_field */
    uint8_t  key_type;            /* PREFIX: enum pg_key_type, not UUID; else 0 */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes, 1..63 */
    uint8_t  prefix_len;          /* PREFIX: 1..255; else 0 */
    uint8_t  topic_len;           /* TOPIC: 0..127; else 0 */
    uint8_t  tag_len;             /* TAG: 1..PG_TAG_MAX; else 0 */
    uint8_t  pad[2];
};

#define PG_SWEEPS 16              /* number of sweeps that an arena remembers */

enum pg_sweep_state {
    PG_SW_NONE,                   /* there is no such sweep */
    PG_SW_RUNNING,                /* timers are left */
    PG_SW_DONE,                   /* each selected timer was changed */
    PG_SW_STOPPED,                /* a message stopped it */
    PG_SW_CUT                     /* a resize of the arena or a failure of the WAL ended it */
};
#define PG_SWEEP_STATES 5
enum pg_sweep_change {
    PG_SC_CANCEL,                 /* cancel each timer */
    PG_SC_SHIFT,                  /* move each deadline by time_ns */
    PG_SC_MOVE                    /* give each timer the deadline time_ns */
};
#define PG_SWEEP_CHANGES 3

/* A change of all timers of a selection, in steps. Authoritative. `state` is written last. The row
 * holds the timer that is being changed, so that a rebuild can see whether the change took effect,
 * and counts it. 640 bytes. */
struct pg_sweep {
    uint64_t progress;            /* next slot << 32 | number of timers changed; one store counts a
                                     timer and leaves its slot */
    uint8_t  id[16];              /* chosen by the client */
    int64_t  time_ns;             /* as in pg_sweep_ask; MOVE: with time_kind BOOT or WALL */
    int64_t  begun_ns;            /* arena clock: time of the message that began it */
    uint64_t ticket;              /* ticket of the timer that is being changed; 0 = none yet */
    int64_t  new_ns;              /* SHIFT, MOVE: new deadline of this timer; of a wall timer its wall
                                     deadline */
    uint32_t slot;                /* slot of this timer */
    uint32_t uid;                 /* uid that began the sweep */
    uint32_t namespace_row;
    uint32_t topic;               /* row of the topic; PG_NIL = all topics */
    uint8_t  state;               /* enum pg_sweep_state */
    uint8_t  change;              /* enum pg_sweep_change */
    uint8_t  time_kind;           /* enum pg_time_kind of time_ns */
    uint8_t  pad[5];
    struct pg_select select;      /* `tickets` is set */
    uint8_t  text[512];           /* namespace, prefix, topic and tag */
    uint8_t  pad1[16];
};

/* ---- schedules ------------------------------------------------------------------------- */

enum pg_schedule_state {
    PG_SCHEDULE_NONE,             /* unused row */
    PG_SCHEDULE_ACTIVE,           /* its next occurrence is armed, or it has ended */
    PG_SCHEDULE_PAUSED            /* no occurrence is armed until the schedule is resumed */
};
/* Rule for the next occurrence of a schedule while jobs of earlier ones are open. A job is open until
 * it is acknowledged, dropped or dead. */
enum pg_overlap {
    PG_OVERLAP_ALLOW,             /* the occurrence fires at its time */
    PG_OVERLAP_SKIP,              /* the occurrence ends as skipped at its time */
    PG_OVERLAP_QUEUE,             /* the occurrence fires once no job is open, and the following ones
                                     wait behind it */
    PG_OVERLAP_DELAY,             /* every: the time of the occurrence is every_ns after the end of
                                     the last open job */
    PG_OVERLAPS
};
#define PG_NOMINAL_UNKNOWN -9223372036854775807 /* the daemon has to compute the time */
#define PG_NOMINAL_NONE 9223372036854775807 /* no occurrence follows */
#define PG_FIRED_SPANS 8          /* maximum number of spans of fired occurrences of a schedule */

/* Nominal times whose occurrences have fired, are armed, or may have fired. */
struct pg_fired_span {            /* 16 bytes */
    int64_t  first_ns;
    int64_t  last_ns;
};

/* All fields of a schedule that change together. Nominal times are on the wall clock. */
struct pg_schedule_fields {       /* 288 bytes */
    uint64_t put_version;         /* version of the row at which the blob was written */
    uint64_t revision;            /* 1, and 1 more for each put that changed the schedule */
    uint64_t since_ticket;        /* timers with an older ticket are no occurrences of this row */
    uint64_t count;               /* number of occurrences; 0 = no limit */
    uint64_t armed;               /* number of occurrences that were armed and not taken back */
    int64_t  base_ns;             /* nominal time before `nominal_ns`, or the time of the put */
    int64_t  nominal_ns;          /* nominal time of the newest armed occurrence, or `base_ns` */
    int64_t  after_ns;            /* nominal time of the occurrence that follows; stored alone */
    int64_t  then_ns;             /* nominal time of the occurrence after that; stored alone */
    int64_t  every_ns;            /* time between occurrences; 0 = the blob has a cron expression */
    int64_t  due_ns;              /* every: time of nominal_ns, on the arena's clock. DELAY, and the
                                     occurrence has ended: its end, or the end of its last job;
                                     PG_NOMINAL_UNKNOWN = the group of its jobs is being deleted */
    int64_t  until_ns;            /* latest nominal time; PG_NOMINAL_NONE = no limit */
    int64_t  jitter_ns;           /* an occurrence is up to this much after its nominal time */
    int64_t  put_ns;              /* wall clock: time of the put; if the clock was set back before
                                     the first occurrence, a time after that */
    uint64_t first_ticket;        /* jobs with an older ticket are those of an earlier schedule */
    int64_t  before_ns;           /* newest nominal time that fired before the put; 0 = none */
    uint32_t spans;               /* number of spans in `fired` */
    uint32_t pad;
    uint32_t blob;                /* first granule of the blob: key, spec, zone, tag, payload */
    uint32_t payload_len;
    uint32_t topic;               /* row of the topic of the occurrences */
    uint32_t uid;                 /* uid that put the schedule */
    uint8_t  state;               /* enum pg_schedule_state */
    uint8_t  key_len;
    uint8_t  spec_len;
    uint8_t  zone_len;
    uint8_t  overlap;             /* enum pg_overlap */
    uint8_t  tag_len;             /* 0 = the occurrences have no tag */
    uint8_t  has_priority;        /* 1 = the occurrences have a priority */
    uint8_t  priority;            /* priority of their jobs, 0..PG_PRIORITY_MAX */
    struct pg_fired_span fired[PG_FIRED_SPANS]; /* sorted; a backfill leaves these times out */
};

/* A schedule. Authoritative except for the fields marked "derived". A change writes the fields that
 * are not in use and then stores `version`, which decides. */
struct pg_schedule {              /* 632 bytes */
    uint64_t version;             /* number of changes of the row; fields[version % 2] is in use */
    uint32_t hash;                /* derived: hash of namespace and key */
    uint32_t slot;                /* derived: slot of the armed occurrence; PG_NIL = none */
    uint32_t next_due;            /* derived: next row whose occurrence has to be armed */
    uint32_t next_asked;          /* derived: next row whose times have to be computed */
    uint8_t  is_due, is_asked;    /* derived: 1 = the row is in this list */
    uint8_t  rechecks;            /* derived: 1 = the armed occurrence has to be computed again */
    uint8_t  pad;
    uint32_t open;                /* derived: jobs of its occurrences that are open */
    uint32_t first_hashed;        /* derived: first row whose hash leads to this row; PG_NIL = none */
    uint32_t next_hashed;         /* derived: next row whose hash leads to the same row */
    struct pg_fired_span found;   /* derived: span of armed additional occurrences that a rebuild
                                     found, and that the fields lack */
    struct pg_schedule_fields fields[2];
};

/* ---- cursors --------------------------------------------------------------------------- */

enum pg_cursor_state {
    PG_CURSOR_FREE,               /* unused row */
    PG_CURSOR_HEAD,               /* a cursor */
    PG_CURSOR_POSITION            /* the position of a cursor in one topic */
};

/* A cursor of a subscriber, or its position in one topic. All notices of the topic up to `sequence`
 * are committed: the subscriber has handled them. A topic without a position has no committed
 * notice. Authoritative. 128 bytes. */
struct pg_cursor {
    uint64_t sequence;            /* position: sequence of the newest committed notice */
    uint64_t incarnation;         /* position: incarnation of the topic. Cursor: next incarnation
                                     when the cursor was created, so topics with a lower incarnation
                                     are older than the cursor */
    uint64_t session;             /* cursor: session that holds it, as long as that session exists;
                                     0 = none */
    int64_t  used_boot_ns;        /* real clock: cursor: last OPEN or COMMIT; position: last
                                     COMMIT */
    uint32_t state;               /* enum pg_cursor_state; written last */
    uint32_t cursor;              /* position: row of its cursor */
    uint32_t topic;               /* position: row of the topic */
    uint32_t namespace_row;       /* cursor: its namespace */
    uint32_t uid;                 /* cursor: uid that created it */
    uint32_t every_topic;         /* cursor: 1 = it has a position in every older topic of the
                                     namespace */
    uint32_t name_len;            /* cursor: length of the name in bytes */
    uint32_t pad;
    char     name[64];            /* cursor: its name, which is unique in the namespace */
};

/* ---- the replay buffer (authoritative) ---------------------------------------------------- */

enum pg_cause {
    PG_CAUSE_EXPIRED = 1,         /* the deadline of a timer or an operation passed */
    PG_CAUSE_SATISFIED,           /* the condition of an operation came true */
    PG_CAUSE_FAILED,              /* keys of an operation failed, and its condition cannot come true
                                     without them */
    PG_CAUSE_CANCELLED,           /* an operation was cancelled */
    PG_CAUSE_PUBLISHED            /* PUBLISH wrote the notice; the notice has no timer */
};

enum pg_entry_flag {
    PG_E_SUPERSEDED = 1,          /* the key was armed again, so a CANCEL of the key is not answered
                                     with FIRED */
    PG_E_LATE = 2,                /* the timer was armed and due before the daemon's last start */
    PG_E_OPERATION = 4,           /* an operation ended; the payload begins with struct
                                     pg_verdict */
    PG_E_SCHEDULE = 8             /* an occurrence of a schedule; its key is the schedule's key, '@',
                                     and the nominal time: wall clock, ns, as a decimal number */
};

#define PG_ENTRY_JOBS 8          /* pg_entry.meta, derived: jobs use the blob, and the last of them to
                                    end leaves it to the entry */

/* An entry of the replay buffer, 64 bytes. It is a seqlock with `commit` as its counter. The daemon
 * writes `commit` last (store-release), and only then frees the slot. To withdraw an entry, the
 * daemon stores commit = 0 (release) and then frees the blob. Readers copy the entry, check bounds,
 * copy the blob, and trust both copies only if commit has not changed. */
struct pg_entry {
    uint64_t commit;              /* 1 + position of the entry in the replay buffer; 0 = the entry
                                     was withdrawn */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause */
    int64_t  deadline_ns;         /* deadline on the arena's clock */
    int64_t  fired_ns;            /* time of firing, on the arena's clock */
    uint64_t sequence;            /* sequence number of the notice in its topic */
    uint32_t back;                /* distance to the replay buffer position of the topic's previous
                                     notice; 0 = none, or too far away to be in the buffer */
    uint32_t missed;              /* timers of the topic that ended as coalesced before this one */
    uint32_t blob;                /* first granule of the blob: the key, then the payload */
    uint32_t payload_len;         /* length of the payload in bytes */
    uint32_t hash;                /* keyed hash of namespace, key type and key */
    uint16_t topic;               /* row of the topic */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  meta;                /* key type in bits 0-2, PG_ENTRY_JOBS, enum pg_entry_flag in bits
                                     4-7 */
};

/* ---- consumer groups ------------------------------------------------------------------------ */

enum pg_group_flag {
    PG_G_ORDERED = 1,             /* at most one job of each order key is leased, in the order of
                                     their deadlines */
    PG_G_BLOCK = 2,               /* ordered: a dead letter blocks its order key until it is requeued
                                     or dropped */
    PG_G_DROP_OLDEST = 4,         /* if the budget is used up, drop the oldest waiting job instead of
                                     refusing a new timer */
    PG_G_PAUSED = 8,              /* no job is leased */
    PG_G_FLAGS = 16
};

/* Settings of a consumer group, in its row, on the wire and in the WAL. 72 bytes. */
struct pg_group_settings {
    uint64_t max_jobs;            /* budget: pending timers of the topics, plus jobs and dead
                                     letters; the sum of all groups is at most the daemon's
                                     setting `jobs` */
    uint64_t max_bytes;           /* budget: bytes of what max_jobs counts; key and payload of each
                                     count together, rounded up to 16 bytes; 0 = no limit */
    int64_t  retention_ns;        /* time from firing after which a waiting job becomes a dead
                                     letter; 0 = never */
    int64_t  max_lease_ns;        /* longest time from the start of a lease to its end, however often
                                     it is extended */
    int64_t  backoff_base_ns;     /* longest delay before the second attempt; it doubles with each
                                     attempt */
    int64_t  backoff_cap_ns;      /* longest delay before any attempt */
    uint64_t rate;                /* number of leases per second; 0 = no limit */
    uint32_t max_attempts;        /* a job whose attempts have failed so often becomes a dead
                                     letter */
    uint32_t max_dead;            /* number of dead letters that are kept; a newer one replaces the
                                     oldest */
    uint32_t flags;               /* enum pg_group_flag */
    uint32_t pad;
};

/* A consumer group. Authoritative except for the fields after `created_ns` up to `name`. */
struct pg_consumer_group {
    uint32_t name_len;            /* length of the name in bytes; 0 = unused row; written last,
                                     store-release */
    uint32_t namespace_row;
    uint64_t incarnation;         /* identity of the group, different for all groups that ever used
                                     this row; 0 = the group is being deleted */
    struct pg_group_settings settings;
    uint32_t created_uid;         /* uid whose message created it; PG_NIL = unknown */
    uint32_t pad;
    int64_t  created_ns;          /* time of its creation, on the arena's clock */
    uint64_t pending;             /* derived: pending timers and operations of its topics */
    uint64_t pending_bytes;       /* derived: blob bytes of what `pending` counts */
    uint64_t jobs;                /* derived: number of jobs, dead letters included */
    uint64_t bytes;               /* derived: blob bytes of its jobs */
    uint64_t waiting;             /* derived: jobs that could be leased, or wait behind a job with
                                     the same order key */
    uint64_t leased;              /* derived */
    uint64_t delayed;             /* derived: jobs that wait for their next attempt */
    uint64_t dead;                /* derived */
    uint64_t acked;               /* number of acknowledged jobs; a counter */
    uint64_t retried;             /* number of failed attempts that another one follows; a counter */
    uint64_t dropped;             /* number of jobs and dead letters removed unfinished; a counter */
    struct pg_tokens tokens;      /* tokens that `rate` fills */
    uint32_t ready_first[10];     /* derived: first waiting job of each priority; PG_NIL = none */
    uint32_t ready_last[10];
    uint32_t dead_first, dead_last; /* derived: oldest and newest dead letter */
    uint32_t oldest, newest;      /* derived: jobs without an ack that fired first and last, dead
                                     letters excluded; PG_NIL = none */
    uint32_t first_member;        /* derived: row of a member; PG_NIL = none */
    uint32_t last_member;         /* derived: member that got the last lease */
    char     name[64];
};

/* A topic of a consumer group. Authoritative except for `next`. */
struct pg_group_topic {
    uint32_t group;               /* 1 + row of the group; 0 = unused row; written last */
    uint32_t topic;               /* row of the topic */
    uint32_t next;                /* derived: 1 + next row with the same topic; 0 = none */
    uint32_t pad;
};

/* A session that takes jobs of a group. Derived: after a restart of the daemon, members with leases
 * are found again, and all members join again. */
struct pg_member {
    uint64_t session;             /* 0 = unused row */
    uint32_t group;               /* row of the group */
    uint32_t credits;             /* number of jobs that the member may hold */
    uint32_t held;                /* number of jobs that it holds */
    uint32_t first, last;         /* jobs that it holds, oldest lease first; PG_NIL = none */
    uint32_t unsent;              /* first of these jobs that was not sent; PG_NIL = none */
    uint32_t next;                /* next member of the group; unused row: next unused row */
    uint32_t pad;
    int64_t  lease_ns;            /* length of its leases */
};

enum pg_job_state {
    PG_JOB_FREE,
    PG_JOB_WAITING,                 /* can be leased, unless an earlier job has its order key */
    PG_JOB_LEASED,                  /* a member holds it until due_ns */
    PG_JOB_DELAYED,                 /* waits until due_ns for its next attempt */
    PG_JOB_DEAD,                    /* a dead letter */
    PG_JOB_STATES
};
enum pg_job_reason {              /* the reason why a job became a dead letter */
    PG_JR_NONE,                   /* the job is no dead letter */
    PG_JR_MAX_ATTEMPTS,           /* all attempts of the job failed */
    PG_JR_REJECTED,               /* a member rejected the job */
    PG_JR_TOO_OLD                 /* the job waited longer than the retention of its group */
};
#define PG_JOB_REASON_SHIFT 8            /* pg_job.control: enum pg_job_reason in bits 8-15 */
#define PG_JOB_FAILURES_SHIFT 16         /* pg_job.control: number of failed attempts, in bits
                                            16-31 */
#define PG_JOB_LEASES_SHIFT 32           /* pg_job.control: number of leases, in bits 32-63 */

/* A job of one consumer group. All jobs with the same ticket use one blob, which their entry in the
 * replay buffer uses as well. Authoritative except for the fields marked "derived". `control` is
 * stored last, with release order, and decides. A job whose notice is not committed does not exist.
 * 152 bytes. */
struct pg_job {
    uint64_t control;             /* enum pg_job_state in bits 0-7, reason, failures, leases */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause */
    uint64_t position;            /* 1 + replay buffer position of its notice; 0 = the notice was in
                                     another arena */
    int64_t  deadline_ns;         /* deadline of the timer, on the arena's clock */
    int64_t  fired_ns;            /* time of firing, on the arena's clock */
    int64_t  due_ns;              /* end of the lease, time of the next attempt, or time at which the
                                     job began to wait */
    int64_t  leased_ns;           /* start of the newest lease */
    int64_t  first_failed_ns;     /* time of the first failed attempt; 0 = none failed */
    int64_t  last_failed_ns;      /* time of the newest failed attempt */
    uint64_t session;             /* session that holds the job */
    uint64_t order;               /* hash of its order key */
    uint64_t error;               /* error text of the newest failed attempt: its length in bytes in
                                     the upper half, its blob in the lower half; 0 = none */
    uint32_t blob;                /* first granule: the key, then the payload */
    uint32_t payload_len;
    uint32_t hash;                /* keyed hash of namespace, key type and key */
    uint32_t next, previous;      /* derived: neighbours in the list of its state */
    uint32_t member;              /* derived, LEASED: row of the member */
    uint32_t order_next;          /* derived: next job with the same order key; PG_NIL = none */
    uint32_t order_last;          /* derived, first job of an order key: its last job */
    uint16_t group;               /* row of the group */
    uint16_t topic;               /* row of the topic */
    uint8_t  key_len;
    uint8_t  meta;                /* as in pg_entry */
    uint8_t  priority;
    uint8_t  behind;              /* derived, WAITING: 1 = it waits behind a job with its order
                                     key */
    uint8_t  in_order;            /* derived: 1 = the order index leads to it */
    uint8_t  own_order;           /* 1 = the timer gave an order key; 0 = its key is the order key */
    uint8_t  pad[2];
    uint32_t missed;              /* as in pg_entry */
    uint32_t older, newer;        /* derived: neighbours in the list of the group's jobs by their
                                     time of firing, dead letters excluded; PG_NIL = none */
    uint32_t pad1;
};

/* A change of a job or of a group's settings, whose fields do not fit into one store. The change is
 * complete here before the store that decides, and a rebuild finishes it after a kill.
 * Authoritative. */
struct pg_group_change {
    uint32_t job;                 /* 1 + row of the job that gets the fields `to`; 0 = none; written
                                     after them, store-release */
    uint32_t group;               /* 1 + row of the group that gets `settings`; 0 = none; written
                                     after them, store-release */
    struct pg_group_settings settings;
    struct pg_job to;
};

/* ---- the WAL ------------------------------------------------------------------ */

/* A WAL record describes the state after a change, not the difference. It is written as one frame.
 * The daemon writes the frame to the WAL buffer, a ring in the arena, before the change takes
 * effect. The group-commit thread copies frames from the ring to WAL segments. Snapshot and export
 * files hold frames of the same form. */

#define PG_WAL_BUFFER_HEAD 4096               /* offset of the ring in PG_R_WAL_BUFFER */
#define PG_WAL_BUFFER_MIN 4194304             /* smallest ring in bytes; sizes are powers of two */
#define PG_WAL_BUFFER_MAX 1073741824
#define PG_WAL_FRAME_MAX 131072            /* maximum length of a frame in bytes */
#define PG_WAL_SEGMENT_MAGIC 0x31304c4157475050u  /* "PPGWAL01" read as little endian */
#define PG_SNAPSHOT_MAGIC 0x3150414e53475050u /* "PPGSNAP1" */
#define PG_WAL_MAJOR 1
#define PG_WAL_MINOR 0
#define PG_WAL_SEGMENT_HEAD 4096             /* offset of the first frame in a file */
#define PG_WAL_SEGMENT_MIN 262144            /* smallest WAL segment in bytes */
#define PG_GROUP_HEAD 80                 /* length of a COMMIT_GROUP frame in bytes */
#define PG_GROUP_MAX 1048576             /* maximum bytes of a commit group, all frames included */

enum pg_wal_state { PG_WAL_NONE, PG_WAL_RUNNING, PG_WAL_STOPPED };
/* The system call whose failure stopped the WAL. */
enum pg_storage_call { PG_CALL_NONE, PG_CALL_OPEN, PG_CALL_FALLOCATE, PG_CALL_WRITE,
                       PG_CALL_SYNC, PG_CALL_RENAME, PG_CALL_SYNC_DIR };

/* The start of region PG_R_WAL_BUFFER. A position is a number of bytes appended since the creation
 * of the arena; position p is at p % size in the ring. committed <= tail <= appended <= committed +
 * size. */
struct pg_wal_buffer {
    uint64_t size;                /* size of the ring in bytes; fixed at creation */
    uint64_t appended;            /* authoritative, written by the daemon: position after the newest
                                     frame */
    uint64_t tail;                /* authoritative, written by the daemon, store-release: position
                                     after the newest frame whose effect is complete. At most one
                                     frame is between tail and appended */
    uint64_t next_lsn;            /* authoritative, written by the daemon: LSN of the next frame;
                                     stored after `appended` */
    uint64_t pad0[4];             /* puts the fields of the group-commit thread on separate cache
                                     lines */
    uint64_t committed;           /* written by group commit, store-release: all bytes below this
                                     position are on disk, and their space in the ring is free */
    uint64_t committed_lsn;       /* written by group commit, store-release: LSN of the newest frame
                                     on disk; 0 = none */
    uint32_t state;               /* written by group commit, store-release: enum pg_wal_state */
    uint32_t error;               /* errno of the call that stopped the WAL; written before
                                     `state` */
    uint32_t call;                /* enum pg_storage_call that stopped the WAL; written before
                                     `state` */
    uint32_t began_empty;         /* authoritative, written by the daemon: 1 = the arena was empty
                                     before record 1. Each start of the daemon sets this field again
                                     until record 1 has been appended */
    uint64_t error_lsn;           /* first LSN that did not reach the disk; written before
                                     `state` */
    uint64_t group;               /* written by group commit: number of the newest commit group on
                                     disk */
    uint64_t segment;             /* written by group commit: first LSN of the WAL segment being
                                     written */
    uint64_t syncs;               /* written by group commit: number of successful fdatasync
                                     calls */
    uint64_t sync_ns;             /* written by group commit: total time of successful fdatasync
                                     calls */
    uint64_t bytes;               /* written by group commit: number of bytes written */
};

/* Every frame begins with these 24 bytes. The LSN of a frame is the LSN of the previous frame + 1;
 * PAD, COMMIT_GROUP and SEAL repeat the LSN of the previous frame. In the ring, crc, salt and group
 * are 0; the group-commit thread fills them in when it writes the frame to a file. */
struct pg_frame_head {
    uint32_t bytes;               /* length of the whole frame in bytes, a multiple of 8 */
    uint32_t crc;                 /* CRC32C of the frame without this field */
    uint64_t lsn;
    uint32_t salt;                /* salt of the file, so that stale bytes of another file are not
                                     mistaken for frames */
    uint16_t type;                /* enum pg_wal_type */
    uint16_t group;               /* low 16 bits of the number of its commit group */
};

/* After the head come the struct of the type, the parts that the comment of the type lists, and
 * zeros up to a multiple of 8 bytes. Two optional parts come last, pg_asked and pg_timestamps. ARM,
 * WATCH, UNPARK, END, FIRE and OUTCOME end with a pg_timestamps. In an ARM that replaces a timer,
 * the pg_timestamps of the replaced timer precedes it. In END and in such an ARM, a pg_asked
 * precedes all pg_timestamps. The length of the frame shows whether it contains the optional parts;
 * exports of an arena without a WAL lack them. */
enum pg_wal_type {
    PG_WAL_PAD = 1,               /* filler up to the end of the ring; never in a file */
    PG_WAL_COMMIT_GROUP,          /* only in files: pg_wal_group; the first frame of each commit
                                     group */
    PG_WAL_SEAL,                  /* only in files: no struct; follows the last commit group of a
                                     file */
    PG_WAL_NAMESPACE,             /* pg_wal_namespace, name: a namespace was created or
                                     configured */
    PG_WAL_TOPIC,                 /* pg_wal_topic, name: a topic was created or configured */
    PG_WAL_ARM,                   /* pg_wal_arm, pg_wal_row if in_bulk_load, items, key, payload:
                                     a timer was armed, parked or replaced */
    PG_WAL_MOVE,                  /* pg_wal_move, pg_wal_row if in_bulk_load: a timer was
                                     extended */
    PG_WAL_END,                   /* pg_wal_end: a timer was cancelled, or an outcome was
                                     acknowledged or dropped */
    PG_WAL_FIRE,                  /* pg_wal_fire: a timer became a replay buffer entry */
    PG_WAL_SENT,                  /* pg_wal_sent: notices were handed to the socket */
    PG_WAL_WATCH,                 /* pg_wal_watch, a pg_wal_watch_key per watch key, key, payload:
                                     an operation was armed */
    PG_WAL_WATERMARK,             /* pg_wal_watermark, the key if BORN: new watermark or error of a
                                     watch key */
    PG_WAL_GONE,                  /* pg_wal_gone: a watch key was forgotten */
    PG_WAL_OUTCOME,               /* pg_wal_outcome, bitmap of missing keys: an operation ended */
    PG_WAL_SESSION,               /* pg_wal_session: a session ended; an END record follows for each
                                     of its outcomes */
    PG_WAL_HEAD,                  /* only in snapshots, first frame: pg_wal_head */
    PG_WAL_ENTRY,                 /* pg_wal_entry, key, payload: a published notice; in snapshots
                                     any notice that was not sent or not committed by a cursor */
    PG_WAL_LAST,                  /* only in snapshots, last frame: pg_wal_last */
    PG_WAL_OPENED,                /* pg_wal_opened, name: a session was opened */
    PG_WAL_REPLIED,               /* pg_wal_replied: replies were handed to the socket */
    PG_WAL_BULK_LOAD,             /* pg_wal_bulk_load: a bulk load or a newer run of it began, or it
                                     was closed or forgotten */
    PG_WAL_DONE,                  /* pg_wal_done: a row of a bulk load was marked as done without
                                     arming a timer */
    PG_WAL_BLOCK,                 /* only in snapshots: pg_wal_block: which rows of a block are
                                     done */
    PG_WAL_UNPARK,                /* pg_wal_unpark, pg_wal_row if in_bulk_load, items, key,
                                     payload: a parked timer was armed */
    PG_WAL_METRICS,               /* pg_wal_metrics, its pg_wal_histogram, then all pg_wal_bucket:
                                     written once a minute */
    PG_WAL_CONSUMER_GROUP,                 /* pg_wal_consumer_group, a u32 topic row per topic, name: a consumer
                                     group was created, changed or deleted */
    PG_WAL_JOB,                   /* pg_wal_job, error text, key and payload if key_len is not 0: a
                                     job was leased, acknowledged or retried, or is dead; in
                                     snapshots any job */
    PG_WAL_SCHEDULE,              /* pg_wal_schedule, and if has_blob key, spec, zone, tag, payload:
                                     a schedule was put, changed or deleted, or armed an occurrence */
    PG_WAL_CURSOR,                /* pg_wal_cursor, name: a cursor was created, changed or deleted,
                                     or it committed a position */
    PG_WAL_FREED,                 /* pg_wal_freed: the key of an ended timer may be used again */
    PG_WAL_TYPES
};
/* Reserved numbers; a reader of this version refuses them. */
enum pg_wal_type_later {
    PG_LATER_BATCH = 64           /* for replication: sequence and statuses of a session's newest
                                     batch, in the same commit group as the effects of the batch */
};

struct pg_wal_group {
    uint64_t number;              /* number of this commit group: number of the previous commit
                                     group + 1 */
    uint64_t bytes;               /* total length of the commit group's other frames in bytes */
    int64_t  boot_ns;             /* time on the arena's clock, read together with wall_ns */
    int64_t  wall_ns;             /* time on the wall clock, read together with boot_ns */
    uint64_t term;                /* for replication: term of the leader that wrote the commit
                                     group; 0 without replication */
    uint8_t  origin[16];          /* boot id of the host whose clock gave the times of the commit
                                     group */
};

struct pg_wal_namespace {
    uint32_t row;
    uint32_t shard;
    uint32_t owner_uid;
    uint32_t durability;
    uint64_t quota_timers;
    uint64_t quota_bytes;
    uint64_t quota_ops;
    uint64_t park_beyond_ns;
    uint64_t late_per_s;
    uint32_t paused;
    uint32_t pad;
    uint32_t created_uid;         /* as in pg_namespace */
    uint32_t name_len;
};

struct pg_wal_topic {
    uint64_t incarnation;
    uint64_t sequence;            /* 0 for a new topic */
    uint64_t last_position;       /* 0 for a new topic */
    int64_t  slack_ns;            /* as in pg_topic */
    uint64_t late;                /* as in pg_topic */
    uint64_t missed;              /* as in pg_topic */
    uint32_t paused;              /* as in pg_topic */
    uint32_t priority;            /* as in pg_topic */
    uint32_t row;
    uint32_t namespace_row;
    uint32_t created_uid;         /* as in pg_topic */
    uint32_t name_len;
};

struct pg_wal_row {                 /* identifies a row of a bulk load */
    uint8_t  bulk_load[16];
    uint64_t row;
};

struct pg_wal_arm {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  wall_ns;             /* absolute wall deadline; INT64_MIN = none */
    int64_t  armed_ns;
    uint64_t replaced;            /* ticket of the timer that this timer replaces; 0 = none */
    uint32_t slot;
    uint32_t replaced_slot;
    uint32_t topic;               /* row of the topic */
    uint32_t uid;                 /* uid that armed the timer; PG_NIL = unknown, because no message
                                     armed it */
    uint32_t payload_len;
    uint8_t  counted;             /* 1 = the timer is charged to the account of `uid` */
    uint8_t  in_bulk_load;        /* 1 = the timer is a row of a bulk load, and a pg_wal_row
                                     precedes the key */
    uint8_t  key_len;
    uint8_t  key_type;
    uint32_t parked;              /* 1 = the timer is parked, and only this record has the payload;
                                     snapshots leave the payload out */
    uint16_t bulk_loaded;         /* 1 = the timer was put as a row of a bulk load; also in
                                     snapshots */
    uint16_t unique;              /* only in snapshots: 1 = the timer has ended, and its key stays
                                     unique until deadline_ns */
    int64_t  armed_boot_ns;       /* real clock: time of arming; 0 in snapshots */
    uint32_t ext_len;             /* length in bytes of the struct pg_ext items before the key,
                                     without PG_EXT_WALL */
    uint32_t slack_log2;          /* log2 of the timer's slack in ns */
};

struct pg_wal_unpark {              /* fields without a comment are as in pg_wal_arm */
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  wall_ns;
    int64_t  at_ns;
    uint32_t slot;
    uint32_t topic;
    uint32_t uid;                 /* uid to whose account the timer is charged; PG_NIL = none */
    uint32_t payload_len;
    uint8_t  counted;
    uint8_t  in_bulk_load;
    uint8_t  key_len;
    uint8_t  key_type;
    uint32_t bulk_loaded;
    uint32_t ext_len;             /* as in pg_wal_arm */
    uint32_t slack_log2;          /* as in pg_wal_arm */
};

struct pg_wal_move {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  wall_ns;             /* as in pg_wal_arm */
    int64_t  at_ns;
    uint32_t slot;
    uint32_t uid;
    uint32_t in_bulk_load;        /* as in pg_wal_arm */
    uint32_t pad;
};

/* The request that ended a timer. 32 bytes. */
struct pg_asked {
    uint64_t session;             /* session that requested the end; 0 = no batch requested it */
    uint64_t sequence;            /* sequence number of the requesting batch; the REPLIED record of
                                     that batch gives the time of the reply */
    int64_t  deadline_ns;         /* deadline of the ended timer, on the arena's clock */
    uint32_t bulk_loaded;         /* 1 = the ended timer was put as a row of a bulk load */
    uint32_t pad;
};

/* Reason for freeing a slot. DROPPED: the slot held an outcome whose owner's session had ended.
 * SKIPPED and COALESCED: the late policy ended the timer without a notice. */
enum pg_end_cause { PG_END_CANCELLED = 1, PG_END_ACKNOWLEDGED, PG_END_DROPPED, PG_END_SKIPPED,
                    PG_END_COALESCED };
struct pg_wal_end {
    uint64_t ticket;
    int64_t  at_ns;
    uint32_t slot;
    uint32_t cause;               /* enum pg_end_cause */
    uint32_t uid;
    uint32_t topic;
    int64_t  ended_boot_ns;       /* real clock: time at which the timer ended or the outcome was
                                     released */
    uint64_t missed;              /* COALESCED: pg_topic.missed afterwards; otherwise 0 */
};

struct pg_wal_freed {
    uint64_t ticket;              /* ticket of the ended timer */
    uint32_t slot;
    uint32_t pad;
};

struct pg_wal_fire {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  fired_ns;
    uint64_t position;            /* position of the notice in the replay buffer */
    uint64_t sequence;            /* sequence number of the notice in its topic */
    uint64_t previous;            /* 1 + replay buffer position of the topic's previous notice; 0 =
                                     none */
    uint32_t slot;
    uint32_t topic;
    uint16_t flags;               /* enum pg_entry_flag */
    uint16_t slack_log2;          /* as in pg_wal_arm */
    uint32_t bulk_loaded;         /* 1 = the timer was put as a row of a bulk load */
    int64_t  ended_boot_ns;       /* real clock: time at which the timer fired */
    uint32_t missed;              /* as in pg_entry */
    uint32_t jobs;                /* number of jobs that began; a pg_wal_born of each follows */
};

struct pg_wal_born {              /* a job that began with the notice of the record */
    uint32_t row;                 /* row of the job */
    uint16_t group;               /* row of the group */
    uint8_t  priority;            /* as in pg_job */
    uint8_t  own_order;           /* as in pg_job */
    uint64_t order;               /* as in pg_job */
};

struct pg_wal_sent {
    uint64_t from;                /* first replay buffer position that was sent */
    uint64_t upto;                /* replay buffer position after the last one that was sent */
    int64_t  built_ns;            /* time at which the messages were built, on the arena's clock */
    int64_t  handed_boot_ns;      /* real clock: time at which the socket took the last message */
    int64_t  built_boot_ns;       /* real clock: time at which the messages were built */
};

struct pg_wal_watch {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  armed_ns;
    uint64_t threshold;           /* SUM: the sum; QUORUM: number of keys that have to reach their
                                     targets */
    uint64_t session;             /* session of the owner */
    uint32_t slot;
    uint32_t topic;
    uint32_t uid;
    uint32_t payload_len;
    uint16_t keys;
    uint8_t  condition;           /* enum pg_condition */
    uint8_t  notice;              /* 1 = a notice in the topic was requested as well */
    uint8_t  key_len;
    uint8_t  key_type;
    uint8_t  counted;             /* as in pg_wal_arm */
    uint8_t  pad;
};
struct pg_wal_watch_key {
    uint64_t target;              /* ALL, ANY, QUORUM: the target; 2^64 - 1 = already reached */
    uint64_t base;                /* SUM: watermark from which the gain of the key is measured */
    uint64_t cap;                 /* SUM: maximum that this key may contribute to the sum */
    uint32_t row;                 /* row of the watch key */
    uint32_t flags;               /* enum pg_watch_key_flag */
};

enum pg_watermark_flag { PG_WM_BORN = 1, PG_WM_FORGOTTEN = 2 };
struct pg_wal_watermark {
    uint64_t watermark;
    uint32_t row;
    uint32_t error;
    uint32_t namespace_row;
    uint16_t flags;               /* PG_WM_BORN: the watch key is new, and the key follows.
                                     PG_WM_FORGOTTEN: the row is removed when its last watcher
                                     leaves */
    uint8_t  key_len;
    uint8_t  key_type;
    uint32_t uid;                 /* uid to whose account the watch key is charged; PG_NIL = none */
    uint32_t pad;
};

struct pg_wal_gone {
    uint32_t row;
    uint32_t pad;
};

struct pg_wal_outcome {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  ended_ns;
    uint64_t position;            /* 1 + replay buffer position of the operation's notice; 0 = no
                                     notice */
    uint64_t sequence;            /* sequence number of the operation's notice */
    uint64_t previous;            /* for the operation's notice, as in pg_wal_fire */
    uint32_t slot;
    uint32_t topic;
    uint32_t error;
    uint16_t keys;
    uint8_t  cause;               /* enum pg_cause */
    uint8_t  flags;               /* enum pg_entry_flag */
    int64_t  ended_boot_ns;       /* real clock: time at which the operation ended */
    uint32_t jobs;                /* as in pg_wal_fire; they follow the bitmap, padded to a multiple
                                     of 8 bytes */
    uint32_t pad;
};

struct pg_wal_session {
    uint64_t session;
    int64_t  at_boot_ns;          /* real clock: time at which the session ended */
    uint32_t uid;
    uint32_t pid;
    uint64_t dropped;             /* number of unacknowledged outcomes and CHECKs that were
                                     dropped */
};

struct pg_wal_bulk_load {
    uint8_t  bulk_load[16];
    uint64_t fencing_token;
    int64_t  at_ns;
    uint32_t namespace_row;
    uint32_t uid;
    uint32_t state;               /* enum pg_bulk_load_state; NONE = forgotten */
    uint32_t pad;
};

struct pg_wal_schedule {
    uint64_t version;             /* version of the row after the change */
    uint32_t row;
    uint32_t has_blob;            /* 1 = key, spec, zone, tag and payload follow; 0 = the row has
                                     them */
    int64_t  at_ns;
    struct pg_schedule_fields fields;
};

struct pg_wal_done {
    struct pg_wal_row row;
    int64_t  at_ns;
};

struct pg_wal_block {
    uint8_t  bulk_load[16];
    uint64_t number;              /* as in pg_bulk_load_block */
    uint64_t bits[64];
};

struct pg_wal_cursor {
    uint64_t sequence;            /* as in pg_cursor */
    uint64_t incarnation;         /* as in pg_cursor */
    uint32_t state;               /* enum pg_cursor_state; FREE = the cursor was deleted */
    uint32_t namespace_row;
    uint32_t topic;               /* position: row of the topic; else 0 */
    uint32_t uid;
    uint32_t every_topic;         /* as in pg_cursor */
    uint32_t name_len;            /* length of the cursor's name in bytes */
};

/* The arena's settings that struct pg_config needs, and the arena's counters that only rise. */
struct pg_wal_head {
    uint8_t  uuid[16];
    uint8_t  boot_id[16];
    uint64_t stream_id;
    uint64_t epoch;
    uint64_t payload_bytes;
    uint64_t replay_bytes_max;
    uint64_t wal_buffer_bytes;
    uint64_t watermark_ttl_ns;
    uint64_t inbox_max;
    int64_t  tick_ns;
    int64_t  now_ns;              /* current time on the arena's clock */
    int64_t  wall_offset_ns;      /* wall time = the arena's clock + this offset */
    int64_t  created_wall_ns;
    int64_t  wall_origin_ns;
    uint64_t next_ticket;
    uint64_t next_incarnation;
    uint64_t replay_tail;
    uint64_t published;
    uint64_t start_lsn;           /* LSN from which the WAL has to be redone */
    uint32_t capacity;
    uint32_t replay_capacity;
    uint32_t fanout;
    uint32_t namespaces;
    uint32_t topics;
    uint32_t watches;
    uint32_t watermarks;
    uint32_t clock_kind;          /* enum pg_clock_kind */
    uint32_t shard;
    uint32_t shards;
    uint32_t accounts;
    uint32_t bulk_loads;
    uint32_t bulk_load_blocks;
    uint32_t groups;
    uint32_t jobs;
    uint32_t schedules;
    uint32_t cursors;
    uint32_t pad;
};

struct pg_wal_entry {
    uint64_t position;
    uint64_t ticket;              /* as in pg_entry */
    int64_t  deadline_ns;
    int64_t  fired_ns;
    uint64_t sequence;
    uint64_t previous;            /* as in pg_wal_fire */
    uint32_t topic;
    uint32_t payload_len;
    uint8_t  key_len;
    uint8_t  meta;                /* as in pg_entry */
    uint8_t  pad[2];
    uint32_t uid;                 /* uid that published the notice; PG_NIL in snapshots */
    int64_t  ended_boot_ns;       /* real clock: time of publication; 0 in snapshots */
    uint32_t missed;              /* as in pg_entry */
    uint32_t jobs;                /* as in pg_wal_fire; they precede the key; 0 in snapshots */
};

struct pg_wal_last {
    uint64_t frames;              /* number of frames of the snapshot, without this frame */
    uint64_t start_lsn;           /* as in pg_wal_head */
    uint64_t end_lsn;             /* LSN that must be in the WAL before the snapshot is valid */
};

struct pg_wal_opened {
    uint64_t session;
    int64_t  at_boot_ns;          /* real clock: time at which the session was opened */
    uint32_t uid;
    uint32_t pid;                 /* pid of the client, from the kernel; 0 = unknown */
    uint32_t pad;
    uint32_t name_len;            /* length of the client's name in bytes; 0 = the client gave no
                                     name */
};

/* Replies to one session's batches in one iteration of the daemon's loop. A crash may lose such
 * records. */
struct pg_wal_replied {
    uint64_t session;
    uint64_t sequence;            /* sequence number of the first of these batches */
    int64_t  built_boot_ns;       /* real clock: time at which the first reply was built */
    int64_t  handed_boot_ns;      /* real clock: time at which the socket took the last reply */
    uint32_t count;               /* batches */
    uint32_t pad;
};

/* All histograms since the creation of the arena. The difference between two records covers the
 * time between them, so a missing record does not falsify the others. */
struct pg_wal_metrics {
    int64_t  at_boot_ns;          /* real clock: time of the record */
    uint32_t histogram_count;     /* number of histograms, which follow in the order of enum
                                     pg_histogram_id */
    uint32_t bucket_count;        /* total number of buckets of all histograms; they follow the
                                     histograms */
};
struct pg_wal_histogram {
    uint64_t sum_ns;              /* as in pg_histogram */
    uint64_t sum_high;
    uint64_t max_ns;
    uint32_t buckets;             /* number of non-empty buckets, which are stored in ascending
                                     order */
    uint32_t pad;
};
struct pg_wal_bucket {
    uint64_t count;
    uint32_t bucket;              /* number of the bucket, as in pg_histogram */
    uint32_t pad;
};

/* State of a consumer group after a change. */
struct pg_wal_consumer_group {
    uint64_t incarnation;
    struct pg_group_settings settings;
    int64_t  at_ns;               /* time of the change, on the arena's clock */
    uint32_t row;
    uint32_t namespace_row;
    uint32_t created_uid;         /* as in pg_consumer_group */
    uint32_t topics;              /* number of topics; 0 = the group was deleted */
    uint32_t name_len;
    uint32_t pad;
};

/* State of a job after a change. Fields without a comment are as in pg_job. */
struct pg_wal_job {
    uint64_t control;             /* state FREE = the job has ended */
    uint64_t ticket;
    uint64_t position;
    int64_t  at_ns;               /* time of the change, on the arena's clock */
    int64_t  deadline_ns;
    int64_t  fired_ns;
    int64_t  due_ns;
    int64_t  leased_ns;
    int64_t  first_failed_ns;
    int64_t  last_failed_ns;
    uint64_t session;
    uint64_t order;
    uint64_t incarnation;         /* incarnation of the group */
    uint64_t lsn;                 /* snapshots: records before this one do not change the row any
                                     more; otherwise 0 */
    uint32_t row;                 /* row of the job */
    uint32_t error_len;
    uint32_t payload_len;         /* 0 unless the record has the key */
    uint16_t group;
    uint16_t topic;
    uint8_t  key_len;             /* 0 unless the record has the whole job: in snapshots, and if the
                                     job begins without a notice */
    uint8_t  meta;
    uint8_t  priority;
    uint8_t  acked;               /* state FREE: 1 = acknowledged, 0 = dropped */
    uint32_t uid;                 /* uid whose request changed it; PG_NIL = no request */
    uint32_t missed;
    uint8_t  own_order;
    uint8_t  pad[3];
};

enum pg_wal_segment_flag { PG_WAL_BEGAN_EMPTY = 1 }; /* the arena was empty before record 1, the
                                                        first record of this file */
/* The first bytes of every WAL segment and snapshot file; zeros follow up to PG_WAL_SEGMENT_HEAD.
 * Every version keeps magic, version and checksum at these offsets, so that a damaged header is not
 * mistaken for a header of another version. */
struct pg_wal_segment {
    uint64_t magic;               /* PG_WAL_SEGMENT_MAGIC or PG_SNAPSHOT_MAGIC */
    uint32_t major;
    uint32_t minor;
    uint8_t  uuid[16];            /* identity of the arena */
    uint8_t  boot_id[16];
    uint64_t epoch;
    int64_t  boot_ns;             /* time on the arena's clock, read together with wall_ns */
    int64_t  wall_ns;             /* time on the wall clock, read together with boot_ns */
    uint64_t first_lsn;           /* LSN of the first frame; snapshot: its start LSN */
    uint64_t first_group;         /* number of the first commit group */
    uint64_t bytes;               /* length of the file in bytes */
    uint32_t clock_kind;
    uint32_t salt;
    uint32_t flags;               /* enum pg_wal_segment_flag; snapshot: 0 */
    uint32_t crc;                 /* CRC32C of all bytes before this field */
};

/* ---- the private arena file -------------------------------------------------------- */

struct pg_private {
    uint64_t magic;
    uint64_t layout_id;
    uint64_t length;
    uint8_t  uuid[16];            /* identity of the arena to which the file belongs */
    uint64_t secret[2];           /* secret of the key hash */
    uint32_t sessions;            /* number of rows of the session table */
    uint32_t window;              /* PG_WINDOW */
    uint32_t session_bytes;       /* length of a row of the session table in bytes */
    uint32_t reply_bytes;         /* size of a struct pg_reply_memory in bytes */
    uint64_t rows_offset;
    uint64_t replies_offset;      /* offset of an array: sessions x window x struct
                                     pg_reply_memory */
    uint64_t next_session;        /* authoritative: serial number of the next session */
    uint64_t version;             /* written last: PG_PRIVATE_MAGIC */
    uint64_t heap_offset;         /* derived: offset of the struct pg_blob_heap of the answer
                                     pool */
    uint64_t map_offset;          /* derived: offset of a bitmap of the granules of the answer pool
                                     that are in use */
    uint64_t answers_offset;      /* offset of the answer pool: `answers` x struct pg_result */
    uint32_t answers;             /* maximum number of results that the replies of all sessions can
                                     hold together */
    uint32_t pad;
};

#define PG_BUSY_KEYS 2048         /* number of bits of a session's set of busy keys */

/* A client session. Authoritative. `last` moves to a batch only when every result of the batch is
 * in the reply memory. */
struct pg_session {
    uint64_t id;                  /* id of the session: random bits << 16 | row; 0 = unused row;
                                     written last */
    uint8_t  nonce[16];           /* chosen by the client; a HELLO with the same nonce returns the
                                     same session */
    uint32_t uid;                 /* uid of the client, from the kernel */
    uint32_t pid;                 /* pid of the client, from the kernel; 0 = unknown */
    uint64_t last;                /* sequence of the last batch that was applied completely; 0 =
                                     none */
    uint64_t current;             /* sequence of the batch being applied; 0 = none */
    uint32_t applied;             /* number of records of the current batch that were applied */
    uint32_t count;               /* number of records of the current batch */
    uint64_t intent[4];           /* the record that is being applied; recovery completes it or
                                     takes it back */
    int64_t  opened_boot_ns;      /* real clock: time of the HELLO that opened the session */
    int64_t  used_boot_ns;        /* real clock: time of the client's last message */
    uint32_t inbox_head, inbox_tail; /* derived: slots of the oldest and the newest outcome or
                                        CHECK */
    uint32_t inbox_next;          /* derived: slot of the next outcome or CHECK to send; PG_NIL =
                                     all were sent */
    uint32_t inbox_count;         /* derived: number of outcomes and CHECKs in the inbox */
    int64_t  inbox_boot_ns;       /* real clock: time of the last message with outcomes, or of the
                                     last acknowledgement */
    uint64_t bulk_load;           /* current batch: 1 + row of its bulk load; 0 = none */
    uint64_t charged;             /* number of records of the current batch that were charged to the
                                     quotas */
    int64_t  begun_boot_ns;       /* real clock: time at which the application of the current batch
                                     began */
    uint64_t bulk_load_first;     /* current batch: its first record is this row of the bulk load */
    uint64_t first_id;            /* id that the session had before its namespaces were moved to
                                     another arena; 0 = same as id */
    int64_t  worked_ns;           /* real clock: duration of the loop's work on the current batch so
                                     far */
    uint64_t busy_first, busy_last;  /* sequences of the first and the last batch with a record
                                        answered BUSY. busy_last is written after busy_keys; 0 =
                                        busy_keys is empty */
    uint64_t busy_keys[PG_BUSY_KEYS / 64]; /* hashed set of the keys of records that were answered
                                              BUSY. A key stays in the set until it is certain that
                                              the client has seen that answer */
    uint8_t  worker_len;          /* length of the client's name in bytes; 0 = the client gave no
                                     name */
    char     worker[PG_WORKER_MAX]; /* name of the client, for display only; written before `id` */
    int64_t  grace_ns;            /* time in ns that the session outlives its client */
    uint32_t owned;               /* derived: number of operations that the session owns, armed or
                                     with an unacknowledged outcome */
    uint32_t repeats;             /* derived: number of times that the inbox was sent again since
                                     the last acknowledgement */
    uint32_t away;                /* derived: 1 = no client is connected to receive the inbox */
    uint32_t evicted;             /* derived: 1 = a group was deleted while the session was a member,
                                     and no JOBS message has reported that */
};

/* Answer to one record, as stored and as sent in the reply. */
struct pg_result {
    uint64_t ticket;              /* ticket << 8 | enum pg_status */
    int64_t  deadline_ns;         /* deadline of the timer on the arena's clock; 0 = there is no
                                     timer. EXISTS of a key that is unique for a time: minus
                                     that time. JOB_EXTEND: time until the lease ends, ns */
};

/* One reply of a session. Its `count` results are in the answer pool, from granule `answers` on.
 * They stay there from the start of the batch until another batch uses this row. */
struct pg_reply_memory {
    uint64_t sequence;            /* sequence number of the batch that the reply answers; 0 =
                                     none */
    uint32_t count;
    uint32_t checksum;            /* checksum of the batch; a batch that is sent again must have the
                                     same bytes */
    uint32_t extra_blob;          /* blob of the keys of the operations that CANCEL_FOR_KEY ended;
                                     PG_NIL = none */
    uint32_t extra_bytes;
    uint32_t answers;             /* first granule in the answer pool; PG_NIL = no results, or they
                                     were discarded */
    uint32_t pad;
};

/* ---- the wire: commands --------------------------------------------------------- */

#define PG_WIRE_MAGIC 0x51434750u        /* "PGCQ" */
#define PG_WIRE_VERSION 1

/* Each comment names the socket and the effect of the message. It ends with the bytes that follow
 * the frame: the bytes of the request, "->", the bytes of the reply. */
enum pg_message {
    PG_M_HELLO = 1,               /* command socket: open a session. pg_hello, name -> pg_welcome */
    PG_M_BATCH,                   /* command socket: apply records. Names, records, bytes ->
                                     pg_result per record */
    PG_M_QUERY,                   /* command socket: look up timers. Names, records, bytes ->
                                     pg_info and bytes per record */
    PG_M_BYE,                     /* command socket: end the session and free its outcomes */
    PG_M_PING,                    /* both sockets: check that the loop answers. The reply comes
                                     after any reload that an earlier SIGHUP requested */
    PG_M_OUTCOMES,                /* command socket: the daemon sends outcomes and CHECKs without a
                                     request. pg_outcome, bytes */
    PG_M_ACK,                     /* command socket: acknowledge outcomes, or answer CHECKs with
                                     "false". pg_ack of each; the daemon replies only if it refuses
                                     the message */
    PG_M_BULK_LOAD,               /* both sockets: ask about a bulk load, or change it.
                                     pg_bulk_load_ask, name -> pg_bulk_load_info, pg_bulk_load_part
                                     of each block */
    PG_M_PLACE,                   /* both sockets, deployment of shards: assign a namespace to
                                     shards. Name of the namespace */
    PG_M_LIST = 10,               /* command socket: list or count timers of a selection. pg_list_ask,
                                     pg_select, names -> pg_listed, pg_info and bytes of each timer */
    PG_M_SWEEP,                   /* command socket: cancel or move all timers of a selection, or ask
                                     about such a sweep. pg_sweep_ask, pg_select and names to begin
                                     one -> pg_sweep_info, pg_select and names of each sweep */
    PG_M_GROUP = 12,              /* command socket: create, describe, change or delete a consumer
                                     group. pg_group_ask, names -> pg_group_info and topics of each
                                     group */
    PG_M_JOBS,                    /* command socket: the daemon sends leased jobs without a request.
                                     pg_job_info of each, then topic, key and payload of each. Without
                                     jobs: a group of the session was deleted */
    PG_M_DEAD,                    /* command socket: list, requeue or drop dead letters.
                                     pg_dead_ask, names -> pg_dead_info of each, then topic, key,
                                     payload and error of each */
    PG_M_SCHEDULE = 15,           /* command socket: put, change, run or look up schedules.
                                     pg_schedule_ask, names, key, spec, zone, tag, payload ->
                                     pg_schedule_reply, pg_schedule_info or nominal times */
    PG_M_CURSOR,                  /* command socket: open, commit, close or delete a cursor.
                                     pg_cursor_ask, names, pg_tail and name of topics -> pg_tail and
                                     name of topics */
    PG_M_REPLAY,                  /* command socket: start the process for past notices. Its socket:
                                     read notices. pg_replay_ask, names -> pg_replay_info, notices */
    PG_M_STATS,                   /* socket of the process for past notices: figures of
                                     `purgatoryd stats --json`, without namespaces and uids. -> the
                                     JSON text */
    PG_M_ADVANCE = 32,            /* admin socket: move a virtual clock to at_ns. -> for each topic
                                     that is not reserved, a pg_tail and the names of namespace and
                                     topic */
    PG_M_STOP,                    /* admin socket: stop the daemon cleanly, after the reply */
    PG_M_PUBLISH,                 /* admin socket: write a notice without a timer. pg_publish,
                                     names, key, payload -> pg_result */
    PG_M_NAMESPACE,               /* admin socket: create or configure a namespace.
                                     pg_namespace_set, name -> pg_namespace_set */
    PG_M_SESSIONS,                /* admin socket: list sessions; senders without admin rights see
                                     only sessions of their own uid. -> pg_session_info of each */
    PG_M_DROP,                    /* admin socket: end the session that the frame names; senders
                                     without admin rights may end only sessions of their own uid */
    PG_M_TOPIC                    /* admin socket: create or configure a topic. pg_topic_set, names
                                     -> pg_result */
};

/* Every request and reply begins with these 64 bytes. A reply repeats `message`, `session` and
 * `sequence`. Unused fields are 0. */
struct pg_frame {
    uint32_t magic;               /* PG_WIRE_MAGIC */
    uint16_t version;             /* PG_WIRE_VERSION */
    uint16_t message;             /* enum pg_message */
    uint64_t session;             /* id of the session; HELLO: 0 */
    uint64_t sequence;            /* BATCH: 1, 2, ... per session; other messages: any number, which
                                     the reply repeats */
    uint32_t count;               /* number of records or other items that follow; PLACE: number of
                                     partitions */
    uint16_t names;               /* BATCH, QUERY: number of entries in the name table */
    uint16_t error;               /* reply: enum pg_error; 0 = none */
    uint32_t names_bytes;         /* BATCH, QUERY: length of the name table in bytes, padded to a
                                     multiple of 8 */
    uint32_t flags;               /* sum of flags of enum pg_frame_flag */
    int64_t  at_ns;               /* BATCH under the virtual clock, ADVANCE: virtual time to which
                                     the clock first advances */
    uint64_t detail[2];           /* error reply: the figures that the comment of the error lists.
                                     BATCH: [0] = CLOCK_BOOTTIME of the daemon's host when the
                                     client packed the batch, in ns, 0 = unknown; [1] = sequence of
                                     this batch minus the sequence of the oldest unanswered batch at
                                     the time when this batch was numbered, 0 = no batch was
                                     unanswered */
};
enum pg_frame_flag {
    PG_W_AT = 1,                  /* at_ns is set */
    PG_W_DURABLE = 2,             /* BATCH, SCHEDULE, CURSOR: send the reply only after the WAL has
                                     committed the changes */
    PG_W_DRAIN = 4,               /* STOP: refuse new timers, and stop once no timer is armed */
    PG_W_RESUME = 8,              /* STOP: end the drain, so that timers can be armed again */
    PG_W_BULK_LOAD = 16           /* BATCH: a struct pg_rows precedes the name table; the records
                                     are rows of a bulk load */
};

/* Part of a batch whose records are rows of a bulk load: record n is row first_row + n. */
struct pg_rows {                  /* 32 bytes */
    uint8_t  bulk_load[16];       /* id of the bulk load, chosen by the client; not 0 */
    uint64_t first_row;           /* number of the first record's row in the bulk load */
    uint64_t fencing_token;       /* number of this run of the bulk load; rows of runs with a lower
                                     number are refused */
};

/* BATCH and QUERY: frame, struct pg_rows if PG_W_BULK_LOAD is set, name table, records, byte area.
 * Name table: per entry u8 namespace length, u8 topic length, the bytes of both names. Byte area:
 * per record, in order: key, payload, extension, without padding. Nothing may follow the byte area.
 * The extension of a WATCH is, per watch key, a struct pg_watch_key and the bytes of the key. That of
 * a PUT is its struct pg_ext items. */
enum pg_op {
    PG_OP_PUT = 1,                /* arm a timer */
    PG_OP_CANCEL,                 /* cancel a timer or an operation */
    PG_OP_GET,                    /* QUERY: look up a timer or an operation */
    PG_OP_WATCH,                  /* arm an operation */
    PG_OP_ADVANCE_KEY,            /* raise a watermark to a value; a lower value changes nothing */
    PG_OP_BUMP,                   /* add to a watermark */
    PG_OP_FAIL,                   /* fail a watch key */
    PG_OP_CLEAR,                  /* clear the failure of a watch key */
    PG_OP_FORGET,                 /* remove a watch key: at once, or when the last operation that
                                     watches it ends */
    PG_OP_CANCEL_FOR_KEY,         /* cancel all operations that watch a key */
    PG_OP_COMPLETE,               /* answer a CHECK with "true"; only the owner may do this */
    PG_OP_UNPARK,                 /* arm a parked timer, with its payload */
    PG_OP_JOIN,                   /* become a member of a consumer group, or change the number of
                                     jobs that the member may hold. The key is the group's name */
    PG_OP_JOB_ACK,                /* end a job. The key of this op and of the next four is a struct
                                     pg_lease */
    PG_OP_JOB_NACK,               /* the attempt failed; the payload is the error text */
    PG_OP_JOB_EXTEND,             /* let the lease end later */
    PG_OP_JOB_RELEASE,            /* give the job back, as if it had not been leased */
    PG_OP_JOB_REJECT              /* make the job a dead letter; the payload is the error text */
};
enum pg_put_mode {
    PG_MODE_ERROR,                /* if the key is armed, refuse with EXISTS */
    PG_MODE_REPLACE,              /* if the key is armed, replace its timer */
    PG_MODE_KEEP,                 /* if the key is armed, change nothing */
    PG_MODE_EXTEND,               /* if the key is armed, move its deadline to a later time, never
                                     to an earlier one */
    PG_MODES
};
enum pg_time_kind {
    PG_T_BOOT,                    /* a deadline on the arena's clock */
    PG_T_DELAY,                   /* a delay from the time at which the record is applied */
    PG_T_WALL,                    /* a deadline on the wall clock */
    PG_T_KINDS
};

struct pg_record {                /* 32 bytes */
    uint8_t  op;                  /* enum pg_op */
    uint8_t  mode;                /* PUT: enum pg_put_mode; WATCH: enum pg_condition */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  key_len;             /* length of the key in bytes, 1..255 */
    uint16_t name;                /* index into the name table */
    uint8_t  time_kind;           /* PUT: enum pg_time_kind of time_ns; WATCH: PG_T_BOOT or
                                     PG_T_DELAY */
    uint8_t  flags;               /* WATCH: 1 = write a notice to the topic as well. PUT: 1 + n =
                                     the timer has a slack of 2^n ns, n at most 46; 0 = it has the
                                     topic's slack. CANCEL: 1 = if the timer has fired, end its jobs
                                     that no member holds. Otherwise 0 */
    uint32_t payload_len;         /* PUT, WATCH, UNPARK: length of the payload in bytes, 0..65536 */
    uint32_t ext_len;             /* WATCH: length of its watch keys in bytes. PUT: length of its
                                     struct pg_ext items in bytes. Otherwise 0 */
    int64_t  time_ns;             /* PUT, WATCH: deadline or delay, ns. JOIN: length of the member's
                                     leases. JOB_NACK: delay until the next attempt, -1 = as the
                                     group's settings say. JOB_EXTEND: time until the lease ends */
    uint64_t value;               /* CANCEL: ticket that the timer must have, 0 = any. PUT with mode
                                     EXTEND: as for CANCEL, but an operation is extended only if its
                                     ticket is given; UNKNOWN = there is no such timer. UNPARK:
                                     ticket of the parked timer. WATCH: threshold of a SUM, number
                                     of keys of a QUORUM. ADVANCE_KEY: new watermark. BUMP: amount
                                     to add. FAIL: error code. COMPLETE: version of the CHECK. JOIN:
                                     number of jobs that the member may hold; 0 = it gets no more
                                     jobs */
};

/* Identity of a lease: the key, with type BYTES, of the records that answer a job. */
struct pg_lease {                 /* 16 bytes */
    uint64_t ticket;              /* ticket of the job, without the cause */
    uint32_t row;                 /* row of the job */
    uint32_t lease;               /* number of the job's lease, which is the fencing token */
};

enum pg_watch_key_flag {
    PG_WK_OWN = 1                 /* the key is forgotten when the operation ends */
};

struct pg_watch_key {             /* 24 bytes, then the key_len bytes of the key */
    uint64_t target;              /* ALL, ANY, QUORUM: target, at most PG_TARGET_MAX. SUM: watermark
                                     from which the gain of the key is measured; 2^64 - 1 = from the
                                     watermark at the time of arming */
    uint64_t cap;                 /* SUM: maximum that this key may contribute to the sum; other
                                     conditions: 0 */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  flags;               /* enum pg_watch_key_flag */
    uint8_t  pad[5];
};

/* Status of a record. The numbers never change. Each status that refuses a record has a counter,
 * listed in metrics.c. */
enum pg_status {
    PG_ST_NONE = 0,               /* no answer; never in a reply */
    PG_ST_ADDED = 1,              /* PUT, WATCH: armed */
    PG_ST_REPLACED = 2,           /* PUT with mode REPLACE: armed; the old timer is gone */
    PG_ST_KEPT = 3,               /* PUT with mode KEEP, or EXTEND to an earlier time: the armed
                                     timer is unchanged */
    PG_ST_EXTENDED = 4,           /* PUT with mode EXTEND: same ticket, later deadline */
    PG_ST_EXISTS = 5,             /* WATCH, or PUT with mode ERROR: the key is armed. PUT with mode
                                     REPLACE, or with mode EXTEND and no ticket: the key is that of
                                     an operation. PUT or WATCH: the key is unique for a time, and
                                     the answer has minus that time as deadline_ns */
    PG_ST_CANCELLED = 6,          /* CANCEL: the timer will not fire, or the operation has ended */
    PG_ST_FIRED = 7,              /* CANCEL: too late; the replay buffer has the notice of the timer,
                                     or a job of it waits */
    PG_ST_UNKNOWN = 8,            /* no such timer, operation or watch key */
    PG_ST_FOUND = 9,              /* GET: the timer or operation exists */
    PG_ST_DONE = 10,              /* ADVANCE_KEY, BUMP, FAIL, CLEAR, FORGET, CANCEL_FOR_KEY,
                                     COMPLETE: done; deadline_ns = number of operations that the
                                     record ended. PUBLISH: done; deadline_ns = time of the
                                     notice */
    PG_ST_MORE = 11,              /* CANCEL_FOR_KEY: deadline_ns = number of operations that the
                                     record ended; more operations remain, so send the record
                                     again */
    PG_ST_BULK_LOADED = 12,       /* PUT: this row of the bulk load is already done; ticket and
                                     deadline_ns are those of the key's current timer, if any */
    PG_ST_PARKED = 13,            /* PUT: accepted and parked; GET: the timer is parked */
    PG_ST_UNPARKED = 14,          /* UNPARK: armed, with its old ticket and deadline */
    PG_ST_LEASED = 15,            /* CANCEL: too late; a member of a consumer group holds the job */
    PG_ST_FULL = 16,              /* no free timer slot */
    PG_ST_FULL_PAYLOAD = 17,      /* no space for key and payload */
    PG_ST_FULL_NAMESPACES = 18,   /* no free row for a new namespace */
    PG_ST_FULL_TOPICS = 19,       /* no free row for a new topic */
    PG_ST_FULL_TICKETS = 20,      /* the shard has given out all its tickets */
    PG_ST_FULL_KEYS = 21,         /* no free row for a new watch key */
    PG_ST_FULL_WATCHES = 22,      /* no free watch records */
    PG_ST_FULL_ACCOUNTS = 23,     /* no free account row; a uid to which a quota or a share applies
                                     needs one */
    PG_ST_TOO_FAR = 24,           /* the deadline is past the end of the clock, 2^63 - 1 ns */
    PG_ST_DENIED = 25,            /* the namespace has another owner, or the name is reserved */
    PG_ST_BUSY = 26,              /* the message has to be sent again. WATCH: if deadline_ns is not
                                     0, the session owns that many operations, armed or with an
                                     unacknowledged outcome, and may not own more */
    PG_ST_QUOTA = 27,             /* a quota is used up: ticket = quota << 8 | enum pg_quota,
                                     deadline_ns = current use. Quotas of operations per second:
                                     deadline_ns = time on the real boot clock at which the next
                                     operation is allowed. From UID_TOPICS on in enum pg_quota:
                                     deadline_ns = uid << 32 | number of rows that the uid holds */
    PG_ST_WRONG_SHARD = 28,       /* PUBLISH: the namespace is in another shard */
    PG_ST_DUPLICATE = 29,         /* WATCH: a key occurs twice */
    PG_ST_OVERFLOW = 30,          /* the watermark would exceed 2^63 - 1 */
    PG_ST_WAL = 31,               /* the WAL has stopped; nothing can be armed */
    PG_ST_STOPPING = 32,          /* PUT, WATCH, UNPARK: the daemon drains and arms nothing */
    PG_ST_FULL_BULK_LOADS = 33,   /* no free row for the bulk load, or no free block for its rows */
    PG_ST_FENCED = 34,            /* a newer run of the bulk load has begun */
    PG_ST_CLOSED = 35,            /* the bulk load is closed, and this row is not done */
    PG_ST_ARENA = 36,             /* PUT, WATCH, UNPARK: the arena files were unlinked and there is
                                     no space for a copy, so a timer could not outlive the daemon */
    PG_ST_FULL_GROUP = 37,        /* PUT, WATCH, PUBLISH: the budget of a consumer group of the topic
                                     is used up: ticket = row of the group, deadline_ns = jobs that
                                     it counts */
    PG_ST_LEASE_LOST = 38,        /* JOB_*: the lease has ended, or another session has it; nothing
                                     was changed */
    PG_ST_NO_GROUP = 39,          /* JOIN: there is no such consumer group */
    PG_ST_FULL_MEMBERS = 40,      /* JOIN: no free row for a member */
    PG_ST_FULL_SCHEDULES = 45,    /* no free row for a schedule */
    PG_ST_BAD_SPEC = 46,          /* a cron expression or a time zone that the daemon cannot read */
    PG_ST_NO_OCCURRENCE = 47      /* no occurrence within the limits of the schedule */
};

/* The quota that is used up. UID_TOPICS and the constants after it are the uid's shares of
 * tables. */
enum pg_quota {
    PG_Q_NAMESPACE_TIMERS = 1,    /* number of armed timers of the namespace */
    PG_Q_NAMESPACE_BYTES,         /* total bytes of keys and payloads of the namespace's armed
                                     timers */
    PG_Q_NAMESPACE_OPS,           /* adds, watches and advances per second in the namespace */
    PG_Q_UID_TIMERS,              /* number of armed timers of the uid */
    PG_Q_UID_BYTES,               /* total bytes of keys and payloads of the uid's armed timers */
    PG_Q_UID_OPS,                 /* adds, watches and advances per second of the uid */
    PG_Q_UID_TOPICS,              /* number of topics that the uid created */
    PG_Q_UID_NAMESPACES,          /* number of namespaces that the uid created */
    PG_Q_UID_SESSIONS,            /* number of sessions of the uid */
    PG_Q_UID_WATCH_KEYS,          /* number of watch keys that the uid created */
    PG_Q_UID_WATCHES,             /* number of watch records of the uid's operations */
    PG_Q_UID_OPERATIONS,          /* number of operations that the uid's sessions own */
    PG_Q_UID_BULK_LOADS,          /* number of bulk loads that the uid began */
    PG_Q_UID_BULK_LOAD_BLOCKS,    /* number of blocks of rows of the uid's bulk loads */
    PG_Q_UID_SCHEDULES,           /* number of schedules that the uid put */
    PG_Q_UID_CURSORS              /* number of rows of the uid's cursors */
};

/* Error of a whole message. Nothing of the message was applied, unless the comment says otherwise.
 * The numbers never change. */
enum pg_error {
    PG_ERR_NONE = 0,              /* no error; each record has its own status */
    PG_ERR_MALFORMED = 1,         /* the message is malformed. detail: byte offset or record index,
                                     value found */
    PG_ERR_VERSION = 2,           /* the protocol versions differ. detail: version of the daemon,
                                     version of the message */
    PG_ERR_UNKNOWN_MESSAGE = 3,   /* this socket does not accept this kind of message. detail:
                                     number of the message kind */
    PG_ERR_TOO_LARGE = 4,         /* the message exceeds a limit. detail: limit, value found */
    PG_ERR_SESSION_EXPIRED = 5,   /* the daemon does not know the session */
    PG_ERR_OUT_OF_ORDER = 6,      /* an earlier BATCH is missing. detail: expected sequence,
                                     sequence found */
    PG_ERR_STALE = 7,             /* the daemon has forgotten the reply to this BATCH. detail:
                                     sequence of the oldest reply that it remembers, sequence
                                     found */
    PG_ERR_CHANGED = 8,           /* the BATCH has the sequence of an earlier BATCH but different
                                     bytes */
    PG_ERR_SESSIONS_FULL = 9,     /* no free row for a session. detail: number of rows in the table,
                                     longest time in ns since the last message of a session */
    PG_ERR_DENIED = 10,           /* the uid may not do this. detail: uid */
    PG_ERR_STOPPING = 11,         /* the daemon is about to stop; send the message again later */
    PG_ERR_CLOCK = 12,            /* ADVANCE or at_ns without a virtual clock, or to an earlier
                                     time */
    PG_ERR_INTERNAL = 13,         /* a fault in the daemon; its log has the details */
    PG_ERR_NO_WAL = 14,           /* durability was requested, but the daemon has no WAL */
    PG_ERR_NAMESPACES_FULL = 15,  /* NAMESPACE, BULK_LOAD: no free row for a new namespace. detail:
                                     number of rows in the table */
    PG_ERR_NOT_DURABLE = 16,      /* BATCH: applied, but the WAL stopped before the batch was on
                                     disk. detail: newest LSN on disk, errno */
    PG_ERR_BUSY = 17,             /* NAMESPACE, BULK_LOAD, SWEEP: the WAL cannot take the change now;
                                     detail: status BUSY or WAL. SWEEP: PG_SWEEPS sweeps are running;
                                     detail: status FULL, PG_SWEEPS. BATCH: the answer pool is full of
                                     recent replies; detail: number of results that the pool can
                                     hold */
    PG_ERR_BULK_LOADS_FULL = 18,  /* BULK_LOAD: no free row for a bulk load. detail: number of rows
                                     in the table */
    PG_ERR_FENCED = 19,           /* BULK_LOAD: a newer run has begun. detail: fencing token of that
                                     run, fencing token of the message */
    PG_ERR_WRONG_SHARD = 20,      /* the namespace is in another shard, or in no shard yet. detail:
                                     number of the answering shard, number of shards. If a
                                     deployment's router answers, detail: version of the routing
                                     table, number of shards */
    PG_ERR_PLACED = 21,           /* PLACE: the namespace exists with another number of partitions.
                                     detail: number of its partitions, number requested */
    PG_ERR_QUOTA = 22,            /* HELLO, NAMESPACE, BULK_LOAD, PLACE, CURSOR: the uid already
                                     holds its whole share of a table. detail: ticket and
                                     deadline_ns as for status QUOTA */
    PG_ERR_GROUP = 23,            /* GROUP, DEAD: refused. detail: enum pg_group_refusal, figure */
    PG_ERR_SCHEDULE = 25,         /* SCHEDULE: nothing was changed. detail: status (FULL_SCHEDULES,
                                     BAD_SPEC, NO_OCCURRENCE, or one that refuses a PUT), and for
                                     FULL_SCHEDULES the number of rows in the table */
    PG_ERR_CURSOR = 26            /* CURSOR, REPLAY: refused. detail: enum pg_cursor_refusal, its
                                     figure */
};

/* HELLO request: frame, struct pg_hello, name. Reply: frame, struct pg_welcome. */
struct pg_hello {
    uint8_t  nonce[16];           /* chosen at random by the client; a repeated nonce returns the
                                     same session */
    uint32_t name_len;            /* length of the client's own name in bytes, 0..63; the WAL
                                     records the name */
    uint32_t pad;
    int64_t  grace_ns;            /* time that the session outlives its client and can be found by
                                     its nonce, ns; 0 to PG_GRACE_MAX_NS */
};
struct pg_welcome {
    uint64_t session;             /* id of the session, for all later frames */
    uint64_t stream_id;           /* identity of this arena's notice streams; changes if their
                                     continuity is lost */
    uint8_t  uuid[16];            /* identity of the arena */
    uint64_t layout_id;           /* layout of the arena; a reader with another layout must not map
                                     it */
    uint64_t epoch;               /* number of daemon starts */
    int64_t  now_ns;              /* current time on the arena's clock */
    int64_t  wall_offset_ns;      /* wall time = the arena's clock + this offset */
    uint64_t last;                /* sequence number of the newest batch applied for this session; 0
                                     = none */
    uint64_t tick_ns;             /* length of a tick of the wheel, ns */
    uint32_t clock_kind;          /* enum pg_clock_kind */
    uint32_t window;              /* maximum number of batches without an answer */
    uint32_t batch_records;       /* maximum number of records in a batch */
    uint32_t message_bytes;       /* maximum length of a message in bytes */
    int64_t  real_boot_ns;        /* the daemon's CLOCK_BOOTTIME, even under the virtual clock */
    uint32_t node;                /* 1 + NUMA node of the arena, or of the daemon's threads if the
                                     arena is bound to no node; 0 = any */
    uint32_t reaper_cpu;          /* 1 + CPU of the daemon's loop; 0 = any */
    uint64_t first_id;            /* first id of this session. If first_id has changed, this is
                                     another session with the same nonce */
    uint32_t wal;                 /* 1 = the daemon has a WAL and grants PG_W_DURABLE */
    uint32_t pad;
    uint64_t term;                /* for replication: term of the leader that answers; 0 without
                                     replication */
};

/* NAMESPACE request: frame, struct pg_namespace_set, the bytes of the name. The request changes the
 * settings that its `fields` selects, and creates the namespace if it does not exist. Reply: frame,
 * struct pg_namespace_set with all current settings. */
enum pg_namespace_field {
    PG_N_OWNER = 1,               /* set owner_uid */
    PG_N_DURABILITY = 2,          /* set durability */
    PG_N_TIMERS = 4,              /* set quota_timers */
    PG_N_BYTES = 8,               /* set quota_bytes */
    PG_N_OPS = 16,                /* set quota_ops */
    PG_N_PARK = 32,               /* set park_beyond_ns */
    PG_N_LATE = 64,               /* set late_per_s */
    PG_N_PAUSED = 128,            /* set paused */
    PG_N_FIELDS = 256
};
struct pg_namespace_set {
    uint32_t fields;              /* sum of constants of enum pg_namespace_field */
    uint32_t owner_uid;           /* uid that owns the namespace; 2^32 - 1 = anybody may use it */
    uint32_t durability;          /* 0 = changes are only in memory, 1 = changes are durable */
    uint32_t name_len;            /* length of the name in bytes, 1..63 */
    uint64_t quota_timers;        /* number of timers that may be armed; 0 = no quota */
    uint64_t quota_bytes;         /* maximum total bytes of keys and payloads; 0 = no quota */
    uint64_t quota_ops;           /* maximum number of operations per second; 0 = no quota */
    uint64_t park_beyond_ns;      /* timers with a longer delay than this are parked; 0 = no timer
                                     is parked; needs a WAL */
    uint64_t late_per_s;          /* late timers that fire per second while the daemon catches up, at
                                     most PG_LATE_PER_S_MAX; 0 = PG_LATE_PER_S */
    uint64_t paused;              /* 1 = timers fall due without firing, 0 = they fire */
};

/* TOPIC request: frame, struct pg_topic_set, the bytes of the names of namespace and topic. The
 * request changes the settings that its `fields` selects, and creates the topic if it does not
 * exist. Reply: frame, struct pg_result. Its status is DONE, or the reason why nothing was
 * changed. */
enum pg_topic_field {
    PG_TF_SLACK = 1,              /* set slack_ns */
    PG_TF_LATE = 2,               /* set policy and grace_ns */
    PG_TF_PAUSED = 4,             /* set paused */
    PG_TF_PRIORITY = 8,           /* set priority */
    PG_TF_FIELDS = 16
};
struct pg_topic_set {
    int64_t  slack_ns;            /* slack of new timers of the topic whose PUT gives none, 0 to
                                     PG_SLACK_MAX_NS; armed timers stay as they are */
    int64_t  grace_ns;            /* timers that are later than this follow the policy. SKIP,
                                     COALESCE: PG_LATE_GRACE_MIN_NS to PG_LATE_GRACE_MAX_NS; FIRE:
                                     0 */
    uint32_t fields;              /* sum of constants of enum pg_topic_field */
    uint8_t  policy;              /* enum pg_late_policy, also of timers that are armed */
    uint8_t  paused;              /* 1 = timers fall due without firing, 0 = they fire */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes, 1..63 */
    uint8_t  topic_len;           /* length of the topic's name in bytes, 0..127 */
    uint8_t  priority;            /* priority of the jobs of timers that give none, 0 to
                                     PG_PRIORITY_MAX, the most urgent one */
    uint8_t  pad[7];
};

/* PLACE request: frame (count = number of partitions, 1 on the command socket), the bytes of the
 * namespace's name. Reply, sent when the routing table contains the namespace: frame (count =
 * number of its partitions). */

/* BULK_LOAD request: frame, struct pg_bulk_load_ask, the name of the namespace. Reply: frame,
 * struct pg_bulk_load_info, then `count` of struct pg_bulk_load_part. OPEN, CLOSE and FORGET are
 * idempotent. */
enum pg_bulk_load_action {
    PG_LA_STATUS,                 /* report the bulk load, with its rows from block `from` on */
    PG_LA_OPEN,                   /* begin the bulk load, or this run of it */
    PG_LA_CLOSE,                  /* close the bulk load, so that it accepts no more rows; begin it
                                     first if needed */
    PG_LA_FORGET,                 /* forget the bulk load and its rows, as if it had never begun */
    PG_BULK_LOAD_ACTIONS
};
struct pg_bulk_load_ask {         /* 40 bytes */
    uint8_t  bulk_load[16];       /* id of the bulk load; not 0 */
    uint64_t fencing_token;       /* OPEN, CLOSE: number of the run, as in struct pg_rows; else 0 */
    uint64_t from;                /* STATUS: first block to report; else 0 */
    uint32_t action;              /* enum pg_bulk_load_action */
    uint32_t name_len;            /* OPEN, CLOSE: length of the namespace's name in bytes, 1..63;
                                     else 0 */
};
struct pg_bulk_load_info {        /* 56 bytes */
    uint8_t  bulk_load[16];       /* id of the bulk load, as in the request */
    uint64_t fencing_token;       /* number of the newest run */
    uint64_t rows;                /* rows done */
    uint64_t upto;                /* 1 + number of the highest row that is done */
    uint64_t next;                /* value of `from` for the next request; 2^64 - 1 = no blocks are
                                     left */
    uint32_t uid;                 /* uid that began the bulk load */
    uint32_t state;               /* enum pg_bulk_load_state; NONE = there is no such bulk load */
};
struct pg_bulk_load_part {        /* 520 bytes; for the rows from `number` * 4096 to `number` * 4096
                                     + 4095 */
    uint64_t number;              /* number of the block */
    uint64_t bits[64];            /* bit n % 64 of bits[n / 64] is set if row `number` * 4096 + n is
                                     done */
};

/* GROUP request: frame, struct pg_group_ask, the bytes of the names of namespace and group, then for
 * each topic a u8 with the length of its name and the bytes of the name. Reply: frame, `count`
 * structs pg_group_info, each followed by the bytes of the names of namespace and group, and its
 * topics as in the request. */
enum pg_group_action {
    PG_GA_CREATE,                 /* create the group; if it exists with the same settings and topics,
                                     change nothing */
    PG_GA_DESCRIBE,               /* describe the group; without a name, all groups of the namespace;
                                     without a namespace, all groups */
    PG_GA_CHANGE,                 /* change the settings */
    PG_GA_DELETE,                 /* delete the group and its jobs */
    PG_GA_PAUSE,                  /* lease no jobs until RESUME */
    PG_GA_RESUME,                 /* lease jobs again */
    PG_GROUP_ACTIONS
};
struct pg_group_ask {             /* 88 bytes */
    struct pg_group_settings settings; /* CREATE, CHANGE; else 0 */
    uint32_t action;              /* enum pg_group_action */
    uint32_t topics;              /* CREATE: number of topics; else 0 */
    uint8_t  earliest;            /* CREATE: 1 = begin with the notices of the replay buffer */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes; 0 = DESCRIBE of all
                                     namespaces */
    uint8_t  name_len;            /* length of the group's name in bytes; 0 = DESCRIBE of all groups */
    uint8_t  pad[5];
};
/* Reason for PG_ERR_GROUP. */
enum pg_group_refusal {
    PG_GR_MISSING = 1,            /* there is no such group */
    PG_GR_MISMATCH,               /* the group exists with other settings or topics */
    PG_GR_ROWS,                   /* no free row for a group or one of its topics. detail: rows */
    PG_GR_JOBS,                   /* the budgets of all groups exceed the rows of jobs. detail: rows
                                     that are free */
    PG_GR_PENDING,                /* the topics have more pending timers than the budget. detail:
                                     pending timers */
    PG_GR_SETTINGS                /* a setting is out of bounds. detail: offset of its field */
};
struct pg_group_info {            /* 176 bytes */
    struct pg_group_settings settings; /* current settings */
    uint64_t pending;             /* pending timers and operations of the topics */
    uint64_t waiting;             /* jobs that could be leased, or wait behind a job with their order
                                     key */
    uint64_t leased;              /* jobs that members hold */
    uint64_t delayed;             /* jobs that wait for their next attempt */
    uint64_t dead;                /* dead letters */
    uint64_t bytes;               /* bytes of keys and payloads of all jobs, as in max_bytes */
    uint64_t acked;               /* number of acknowledged jobs; a counter */
    uint64_t retried;             /* number of failed attempts that another one follows; a counter */
    uint64_t dropped;             /* number of jobs and dead letters removed unfinished; a counter */
    int64_t  oldest_ns;           /* time of firing of the oldest job that is not dead; INT64_MAX =
                                     there is none */
    int64_t  created_ns;          /* time of creation, on the arena's clock */
    uint32_t row;                 /* row of the group, as in pg_job_info */
    uint32_t members;             /* number of members */
    uint32_t topics;              /* number of topics that follow */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes */
    uint8_t  name_len;            /* length of the group's name in bytes */
    uint8_t  pad[2];
};

/* JOBS: frame, `count` structs, then for each struct: topic, key, payload. Each job is leased to the
 * session. The daemon sends the jobs that a session holds again when the session joins again. */
struct pg_job_info {              /* 80 bytes */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause */
    int64_t  deadline_ns;         /* deadline on the arena's clock */
    int64_t  fired_ns;            /* time of firing, on the arena's clock */
    int64_t  lease_ends_ns;       /* end of the lease, on the arena's clock */
    int64_t  now_ns;              /* time of sending, on the arena's clock */
    int64_t  wall_offset_ns;      /* wall time = the arena's clock + this offset */
    uint32_t row;                 /* row of the job, for struct pg_lease */
    uint32_t lease;               /* number of this lease, for struct pg_lease */
    uint32_t attempt;             /* 1 + number of failed attempts */
    uint32_t group;               /* row of the group, as in the answer to JOIN */
    uint32_t payload_len;         /* length of the payload in bytes */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  flags;               /* enum pg_entry_flag */
    uint8_t  topic_len;           /* length of the topic's name in bytes */
    uint8_t  priority;            /* 0 to PG_PRIORITY_MAX, the most urgent one */
    uint8_t  pad[3];
    uint32_t missed;              /* timers of the topic that ended without a notice before this one,
                                     by the late policy COALESCE */
};

/* DEAD request: frame, struct pg_dead_ask, the bytes of the names of namespace and group. Reply:
 * frame (detail[0] = number of dead letters that were requeued or dropped, detail[1] = value of
 * `after` for the next page, 0 = there is none), `count` structs pg_dead_info, then for each: topic,
 * key, payload, error text. */
enum pg_dead_action {
    PG_DA_LIST,                   /* list dead letters, the oldest first */
    PG_DA_REQUEUE,                /* let dead letters wait again, with all their attempts */
    PG_DA_DROP,                   /* remove dead letters */
    PG_DEAD_ACTIONS
};
struct pg_dead_ask {              /* 32 bytes */
    uint64_t ticket;              /* REQUEUE, DROP: ticket of the dead letter; 0 = all of the group */
    uint64_t after;               /* LIST: begin after this page, 0 = at the oldest */
    uint32_t action;              /* enum pg_dead_action */
    uint32_t most;                /* LIST: maximum number of dead letters in the reply */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes, 1..63 */
    uint8_t  name_len;            /* length of the group's name in bytes, 1..63 */
    uint8_t  pad[6];
};
struct pg_dead_info {             /* 80 bytes */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause */
    int64_t  deadline_ns;         /* deadline on the arena's clock */
    int64_t  fired_ns;            /* time of firing, on the arena's clock */
    int64_t  first_failed_ns;     /* time of the first failed attempt; 0 = no attempt failed */
    int64_t  last_failed_ns;      /* time of the newest failed attempt; 0 = no attempt failed */
    int64_t  wall_offset_ns;      /* wall time = the arena's clock + this offset */
    uint32_t attempts;            /* number of failed attempts */
    uint32_t reason;              /* enum pg_job_reason */
    uint32_t payload_len;         /* length of the payload in bytes */
    uint32_t error_len;           /* length of the error text in bytes */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  flags;               /* enum pg_entry_flag */
    uint8_t  topic_len;           /* length of the topic's name in bytes */
    uint8_t  priority;            /* 0 to PG_PRIORITY_MAX, the most urgent one */
    uint8_t  pad[11];
};

/* SCHEDULE request: frame, struct pg_schedule_ask, the bytes of namespace, topic, key, spec, zone,
 * tag and payload. Reply: frame, struct pg_schedule_reply, then `count` of struct pg_schedule_info,
 * each followed by the bytes of topic, key, spec, zone, tag and payload. After NEXT and BACKFILL,
 * `count` nominal times (int64_t) follow instead. A reply with status UNKNOWN has nothing after it.
 * Every action may be sent again. */
enum pg_schedule_action {
    PG_SA_PUT,                    /* add the schedule, or change it if it has other settings */
    PG_SA_GET,                    /* look up the schedule */
    PG_SA_LIST,                   /* list the schedules of the namespace from row `from` on */
    PG_SA_DELETE,                 /* remove the schedule and its armed occurrence */
    PG_SA_PAUSE,                  /* take the armed occurrence back, and arm no other */
    PG_SA_RESUME,                 /* go on with the first occurrence after the current time */
    PG_SA_TRIGGER,                /* fire an additional occurrence with nominal time `from` at once */
    PG_SA_BACKFILL,               /* fire the occurrences with nominal times `from` to `until` that
                                     have not fired */
    PG_SA_NEXT,                   /* report the next `count` nominal times after `from`, of a schedule
                                     or, with an empty key, of the settings in the message */
    PG_SCHEDULE_ACTIONS
};
struct pg_schedule_ask {          /* 56 bytes */
    uint8_t  action;              /* enum pg_schedule_action */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes, 1..63 */
    uint8_t  topic_len;           /* PUT: length of the topic's name in bytes, 0..127; else 0 */
    uint8_t  key_len;             /* length of the schedule's key, 1..234 bytes of UTF-8; LIST: 0 */
    uint8_t  spec_len;            /* PUT, NEXT: length of the cron expression; 0 with every_ns */
    uint8_t  zone_len;            /* PUT, NEXT: length of the zone's name; 0 = UTC, or with every_ns */
    uint8_t  overlap;             /* PUT: enum pg_overlap, DELAY only with every_ns; else 0 */
    uint8_t  tag_len;             /* PUT: length of the tag of the occurrences, 0 = none; else 0 */
    uint32_t payload_len;         /* PUT: length of the payload in bytes, 0..65536; else 0 */
    uint8_t  has_priority;        /* PUT: 1 = the occurrences have a priority; else 0 */
    uint8_t  priority;            /* with has_priority: priority of their jobs, 0 to
                                     PG_PRIORITY_MAX; else 0 */
    uint8_t  repeat;              /* BACKFILL: 1 = also the occurrences that have fired; else 0 */
    uint8_t  pad;
    int64_t  every_ns;            /* PUT, NEXT: time between occurrences, at least 1,000,000 ns; 0 =
                                     the spec is a cron expression */
    int64_t  from;                /* TRIGGER, BACKFILL, NEXT: nominal time; NEXT:
                                     PG_NOMINAL_UNKNOWN = the current time; LIST: row, 0 to begin */
    int64_t  until;               /* PUT, NEXT: latest nominal time, 2^63 - 1 = no limit; BACKFILL:
                                     last nominal time, not in the future; else 0 */
    int64_t  jitter_ns;           /* PUT: maximum delay of an occurrence after its nominal time;
                                     else 0 */
    uint64_t count;               /* PUT: number of occurrences, 0 = no limit; NEXT: number of
                                     times, 1 to PG_NOMINAL_MAX; else 0 */
};
struct pg_schedule_reply {        /* 24 bytes */
    uint32_t status;              /* enum pg_status: ADDED, REPLACED (new revision) or KEPT
                                     (unchanged), DONE, UNKNOWN (no such schedule). TRIGGER: KEPT = this
                                     occurrence exists */
    uint32_t pad;
    uint64_t ticket;              /* TRIGGER: ticket of the occurrence. BACKFILL: number of occurrences
                                     that were armed */
    int64_t  next;                /* LIST, BACKFILL: value of `from` for the next request;
                                     PG_NOMINAL_NONE = nothing is left */
};
struct pg_schedule_info {         /* 120 bytes */
    uint64_t revision;            /* 1, and 1 more for each put that changed the schedule */
    uint64_t count;               /* number of occurrences; 0 = no limit */
    int64_t  every_ns;            /* time between occurrences; 0 = the spec is a cron expression */
    int64_t  until_ns;            /* latest nominal time */
    int64_t  jitter_ns;           /* an occurrence is up to this much after its nominal time */
    uint64_t armed;               /* number of occurrences that have fired or are armed */
    int64_t  last_ns;             /* nominal time before next_ns, or the time of the put */
    int64_t  next_ns;             /* nominal time of the next occurrence; PG_NOMINAL_NONE = none
                                     follows, PG_NOMINAL_UNKNOWN = not computed yet */
    int64_t  deadline_ns;         /* wall clock: deadline of the armed occurrence, with jitter;
                                     PG_NOMINAL_NONE = none is armed */
    int64_t  put_ns;              /* wall clock: time of the put */
    uint64_t ticket;              /* ticket of the armed occurrence; 0 = none is armed */
    uint64_t row;                 /* row of the schedule */
    uint32_t uid;                 /* uid that put the schedule */
    uint32_t payload_len;         /* length of the payload in bytes */
    uint8_t  state;               /* enum pg_schedule_state */
    uint8_t  topic_len;           /* length of the topic's name in bytes */
    uint8_t  key_len;             /* length of the schedule's key in bytes */
    uint8_t  spec_len;            /* length of the cron expression in bytes */
    uint8_t  zone_len;            /* length of the zone's name in bytes; 0 = UTC */
    uint8_t  overlap;             /* enum pg_overlap */
    uint8_t  tag_len;             /* length of the tag of the occurrences in bytes; 0 = none */
    uint8_t  has_priority;        /* 1 = the occurrences have a priority */
    uint32_t open;                /* jobs of its occurrences that are open */
    uint8_t  priority;            /* with has_priority: priority of their jobs; else 0 */
    uint8_t  pad[3];
};

/* CURSOR request: frame (count = number of topics, at most PG_CURSOR_TOPICS), struct pg_cursor_ask,
 * the names of namespace and cursor, then per topic a struct pg_tail without a namespace and the
 * topic's name. Reply to OPEN: frame (count = positions), then per position a struct pg_tail without
 * a namespace and the topic's name; `sequence` is the newest committed notice. Other replies: frame.
 * A cursor belongs to the session that opened it, until that session ends or sends CLOSE. All
 * actions are idempotent. */
enum pg_cursor_action {
    PG_CA_OPEN,                   /* create the cursor and the listed topics if they do not exist,
                                     and hold the cursor. Each listed topic, or all topics, without
                                     a position get one: at its newest notice, or before the first
                                     notice of a topic that is younger than the cursor */
    PG_CA_COMMIT,                 /* commit `sequence` of each topic; a lower sequence changes
                                     nothing. A cursor that nobody holds is then held */
    PG_CA_CLOSE,                  /* release the cursor */
    PG_CA_DELETE,                 /* delete the cursor and its positions */
    PG_CURSOR_ACTIONS
};
struct pg_cursor_ask {            /* 16 bytes */
    uint64_t stream_id;           /* COMMIT: stream of the sequences; else 0 */
    uint32_t action;              /* enum pg_cursor_action */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes, 1..63 */
    uint8_t  name_len;            /* length of the cursor's name in bytes, 1..63 */
    uint8_t  every_topic;         /* OPEN: 1 = all topics of the namespace; then no topic follows */
    uint8_t  pad;
};
enum pg_cursor_refusal {
    PG_CR_HELD = 1,               /* another session holds the cursor. Figure: pid of its client, 0 =
                                     unknown */
    PG_CR_FULL,                   /* no row is free. Figure: number of rows of the table */
    PG_CR_STALE,                  /* COMMIT, REPLAY: a sequence is of another stream or topic, so
                                     nothing of that topic was committed. Figure: stream id of the
                                     arena */
    PG_CR_UNKNOWN,                /* COMMIT: there is no such cursor */
    PG_CR_TOPICS                  /* OPEN: no row is free for a listed topic. Figure: number of rows
                                     of the table of topics */
};

/* REPLAY on the command socket: frame. It starts the process that serves the socket for past notices
 * (NAME.back, tcp: the port after that of the notices). Reply: frame. Then, on that socket, REPLAY
 * request: frame, struct pg_replay_ask, the names of namespace and topic. Reply: frame, struct
 * pg_replay_info, and the second frame of a notice message with successive notices from `first` on.
 * They come from the replay buffer or from the WAL. If `count` of that message is 0, no notice of
 * the range is left. */
struct pg_replay_ask {            /* 40 bytes */
    uint64_t stream_id;           /* stream of the sequences; 0 = the current stream */
    uint64_t incarnation;         /* incarnation of the topic; 0 = the current topic */
    uint64_t first;               /* sequence of the first notice; not 0 */
    uint64_t last;                /* sequence of the last notice */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes, 1..63 */
    uint8_t  topic_len;           /* length of the topic's name in bytes, 0..127 */
    uint8_t  pad[6];
};
struct pg_replay_info {           /* 16 bytes */
    uint64_t lost_until;          /* the notices from `first` to this sequence are lost; first - 1 =
                                     none is lost */
    uint64_t next;                /* value of `first` for the next request; above `last` = the range
                                     is complete; above `tail` = no later notice has fired */
};

/* SESSIONS reply: frame, `count` structs. DROP request: frame, whose `session` is the session to
 * end. */
struct pg_session_info {          /* 56 bytes */
    uint64_t session;             /* id of the session */
    int64_t  opened_boot_ns;      /* real clock: time at which the session was opened */
    int64_t  used_boot_ns;        /* real clock: time of the last message of its client */
    int64_t  grace_ns;            /* time that the session outlives its client, ns */
    uint32_t uid;                 /* uid of its client */
    uint32_t pid;                 /* pid of its client; 0 = the client is not on this host, or is in
                                     another pid namespace */
    uint64_t operations;          /* number of operations that the session owns, armed or with an
                                     unacknowledged outcome */
    uint64_t unacknowledged;      /* number of outcomes and CHECKs in its inbox */
};

/* PUBLISH request: frame, this struct, namespace, topic, key, payload. Reply: frame, struct
 * pg_result. Its status is DONE, with the ticket and the time of the notice, or the reason why no
 * notice was written. */
struct pg_publish {
    uint32_t payload_len;         /* length of the payload in bytes, 0..65536 */
    uint8_t  key_len;             /* length of the key in bytes, 1..255 */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes, 1..63 */
    uint8_t  topic_len;           /* length of the topic's name in bytes, 0..127 */
};

/* OUTCOMES: a message frame, `count` structs, then for each struct: key, payload, a uint64_t per
 * watch key (the watermark when the operation ended), the bitmap of missing keys and the bitmap of
 * failed keys. The daemon sends each outcome again until an ACK (frame, `count` structs pg_ack) names it.
 * A CHECK is a struct with cause 0, without watermarks and bitmaps. To answer a CHECK
 * with "false", the client sends an ACK; to answer "true", the op COMPLETE with the version of the
 * CHECK. */
struct pg_outcome {               /* 64 bytes */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause */
    int64_t  deadline_ns;         /* deadline on the arena's clock */
    int64_t  armed_ns;            /* time of arming, on the arena's clock */
    int64_t  ended_ns;            /* time at which the operation ended, on the arena's clock */
    uint64_t version;             /* version of the CHECK; 0 = this is an outcome */
    uint32_t error;               /* error code of the key that failed; 0 = none failed */
    uint32_t payload_len;         /* length of the payload in bytes */
    uint16_t keys;                /* number of watch keys */
    uint16_t bitmap_bytes;        /* length of each bitmap in bytes; 0 = this is a CHECK */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  pad0[2];
    uint32_t slot;                /* slot, which the ACK has to repeat */
    uint32_t pad1;
};
struct pg_ack {
    uint64_t ticket;              /* ticket of the operation; it does not contain the cause, unlike
                                     pg_outcome.ticket */
    uint64_t version;             /* version of the CHECK; 0 = the ACK is for an outcome */
    uint32_t slot;                /* slot from struct pg_outcome */
    uint32_t pad;
};

/* Reply to QUERY, and result of a scan: one struct per record, followed by namespace, topic, key
 * and payload. An operation's payload is followed by a struct pg_info_watch and the key for each
 * watch key, in the order of the WATCH. */
struct pg_info {
    uint64_t ticket;              /* ticket << 8 | enum pg_status (FOUND, PARKED, UNKNOWN,
                                     DENIED) */
    int64_t  deadline_ns;         /* deadline on the arena's clock */
    int64_t  wall_ns;             /* absolute wall deadline; INT64_MIN = none */
    uint32_t payload_len;         /* length of the payload in bytes */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes */
    uint8_t  topic_len;           /* length of the topic's name in bytes */
    uint64_t owner;               /* operation: id of its owner's session; timer: 0 */
    uint64_t threshold;           /* operation: threshold of a SUM, number of keys of a QUORUM */
    uint32_t ext_bytes;           /* number of bytes that follow the payload: pg_info_watch of an
                                     operation, struct pg_ext items of a timer, without
                                     PG_EXT_WALL */
    uint16_t keys;                /* operation: number of watch keys; timer: 0 */
    uint8_t  condition;           /* operation: enum pg_condition */
    uint8_t  slack_log2;          /* timer: log2 of its slack in ns; operation: 0 */
    uint32_t owner_uid;           /* operation: uid of its owner; PG_NIL = unknown */
    uint8_t  pad1[4];
};
struct pg_info_watch {            /* followed by the bytes of the key */
    uint64_t target;              /* target of the watermark; UINT64_MAX = reached. SUM: watermark
                                     from which the gain of the key is measured. CLIENT: 0 */
    uint64_t cap;                 /* SUM: maximum that this key may contribute to the sum */
    uint64_t watermark;           /* current watermark of the key */
    uint32_t error;               /* error code of the key's failure; 0 = not failed */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  own;                 /* 1 = the key is forgotten when the operation ends */
    uint8_t  pad;
};

/* LIST request: frame, this struct, struct pg_select, its names. Reply: frame, struct pg_listed,
 * `count` times a struct pg_info and its bytes. One message looks at a part of the slots only; the
 * next message begins at the slot of the reply. The timers of a reply are in no order: a client that
 * wants the first n by deadline keeps the best n, and sends the last of them as `before`. */
struct pg_list_ask {              /* 48 bytes */
    int64_t  after_ns;            /* only timers whose (deadline, ticket) is higher than (after_ns,
                                     after_ticket) */
    uint64_t after_ticket;        /* ticket of that pair */
    int64_t  before_ns;           /* only timers whose (deadline, ticket) is lower than (before_ns,
                                     before_ticket) */
    uint64_t before_ticket;       /* ticket of that pair */
    uint32_t slot;                /* first slot to look at; 0 to begin */
    uint32_t max;                 /* maximum number of pg_info; 0 = only count */
    uint32_t payloads;            /* 0 = the pg_info have no payloads */
    uint32_t pad;
};
struct pg_listed {                /* 40 bytes */
    uint64_t tickets;             /* value of `tickets` for the next message */
    uint64_t matched;             /* number of timers found in the slots that were looked at */
    int64_t  now_ns;              /* time on the arena's clock */
    int64_t  wall_offset_ns;      /* wall clock minus the arena's clock */
    uint32_t slot;                /* next slot to look at; PG_NIL = there are no more */
    uint32_t pad;
};

/* SWEEP request: frame, this struct; to begin, struct pg_select and its names. Reply: frame, `count`
 * times a struct pg_sweep_info, the struct pg_select of the sweep, its names. A sweep that has begun
 * continues without its client and after a restart of the daemon. The message that begins a sweep may
 * be sent again: an id begins one sweep. */
enum pg_sweep_action {
    PG_SA_STATUS,                 /* answer with the sweep; id 0: with all sweeps of the sender's
                                     namespaces */
    PG_SA_BEGIN,                  /* begin the sweep, unless it exists */
    PG_SA_STOP                    /* stop the sweep, unless it has ended */
};
#define PG_SWEEP_ACTIONS 3
struct pg_sweep_ask {             /* 32 bytes */
    uint8_t  id[16];              /* BEGIN, STOP: not 0 */
    int64_t  time_ns;             /* SHIFT: duration, not 0. MOVE: deadline or delay. Else 0 */
    uint8_t  action;              /* enum pg_sweep_action */
    uint8_t  change;              /* BEGIN: enum pg_sweep_change; else 0 */
    uint8_t  time_kind;           /* MOVE: enum pg_time_kind of time_ns; else 0 */
    uint8_t  pad[5];
};
struct pg_sweep_info {            /* 56 bytes */
    uint8_t  id[16];              /* id of the sweep, as in the request */
    uint64_t done;                /* number of timers changed */
    int64_t  time_ns;             /* as in pg_sweep_ask; a delay has become a deadline */
    int64_t  begun_ns;            /* arena clock: time at which the sweep began */
    uint32_t slot;                /* number of slots that were looked at */
    uint32_t slots;               /* number of slots of the arena */
    uint32_t uid;                 /* uid that began the sweep */
    uint8_t  state;               /* enum pg_sweep_state */
    uint8_t  change;              /* enum pg_sweep_change */
    uint8_t  time_kind;           /* enum pg_time_kind of time_ns */
    uint8_t  pad;
};

/* ADVANCE reply: frame (count = topics), then per topic this struct, the name of the namespace and
 * the name of the topic. CURSOR has the same parts. */
struct pg_tail {
    uint64_t sequence;            /* sequence of the topic's newest notice */
    uint64_t incarnation;         /* identity of the topic; it changes when another topic takes the
                                     topic's row */
    uint8_t  namespace_len;       /* length of the namespace's name in bytes */
    uint8_t  topic_len;           /* length of the topic's name in bytes */
    uint8_t  pad[6];
};

/* ---- the wire: notices ---------------------------------------------------------- */

#define PG_NOTICE_MAGIC 0x4e434750u      /* "PGCN" */

/* Second frame of a notice message: this struct, `count` records, then per record its key and
 * payload. The n-th record (from 0) has sequence first + n. A message without records is a tail
 * heartbeat. */
struct pg_notices {
    uint32_t magic;               /* PG_NOTICE_MAGIC */
    uint16_t version;             /* PG_WIRE_VERSION */
    uint16_t pad0;
    uint64_t stream_id;           /* identity of this arena's notice streams */
    uint64_t incarnation;         /* identity of the topic; it changes when another topic takes the
                                     topic's row */
    uint64_t first;               /* sequence of the first record */
    uint64_t tail;                /* sequence of the topic's newest notice when the message was
                                     built */
    int64_t  built_ns;            /* time at which the message was built, on the arena's clock */
    int64_t  wall_offset_ns;      /* wall time = the arena's clock + this offset */
    uint32_t count;               /* records */
    uint32_t pad1;
};

struct pg_notice {                /* 40 bytes */
    uint64_t ticket;              /* ticket of the timer or operation */
    int64_t  deadline_ns;         /* deadline on the arena's clock */
    int64_t  fired_ns;            /* time at which the timer was taken from the wheel, on the
                                     arena's clock */
    uint32_t payload_len;         /* length of the payload in bytes */
    uint8_t  key_len;             /* length of the key in bytes */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  cause;               /* enum pg_cause */
    uint8_t  flags;               /* enum pg_entry_flag */
    uint32_t missed;              /* timers of the topic that ended without a notice before this
                                     one, by the late policy COALESCE */
    uint8_t  pad[4];
};

/* ---- rings: the messages of the command socket, through memory ------------------------------ */

#define PG_RING_MAGIC 0x31524750u        /* "PGR1" */
#define PG_RING_VERSION 1
#define PG_RING_HEAD 4096                /* offset of the first ring's bytes in the memory */
#define PG_RING_UNIT 8                   /* bytes; a message and the word before it are padded to
                                            this */

enum pg_ring_refusal {            /* the reason why the daemon gives no rings, or no arena */
    PG_RING_NONE,
    PG_RING_MEMORY,               /* the memory for rings is used up */
    PG_RING_UID,                  /* the uid holds its share of this memory */
    PG_RING_DENIED,               /* the client may not read the arena's file */
    PG_RING_UNREAD                /* other clients of the uid have not read such answers; ask again
                                     later */
};
enum pg_ring_sleep {
    PG_RING_AWAKE,
    PG_RING_FUTEX,                /* the side sleeps on the word itself */
    PG_RING_POLL                  /* the side sleeps until its descriptor is readable */
};

/* The daemon sends this over the unix socket NAME.ring to each client that connects. The
 * descriptors of the memory and of the daemon's eventfd come with it, unless it is a refusal.
 * The end of the connection ends the rings.
 *
 * A client whose socket has an abstract address that begins with "purgatoryd-arena" gets no rings.
 * It gets ring_bytes = 0 and a read-only descriptor of the arena, unless it is refused. */
struct pg_ring_offer {
    uint32_t magic;               /* PG_RING_MAGIC */
    uint16_t version;             /* PG_RING_VERSION */
    uint16_t refusal;             /* enum pg_ring_refusal */
    uint64_t ring_bytes;          /* size of each ring, a power of two; 0 = no rings */
};

/* One direction. A message is a word with its length in bytes, then its bytes. A message that is
 * larger than the ring goes in pieces. Positions only grow; the ring has the bytes from `head` to
 * `tail`, each at its position modulo the size. */
struct pg_ring {                  /* 128 bytes */
    uint64_t tail;                /* position after the last byte that was put; written by the
                                     putter */
    uint32_t putter_sleeps;       /* enum pg_ring_sleep: the putter waits for space; set by the
                                     putter, cleared by the taker that wakes it */
    uint32_t pad0;
    uint64_t pad1[6];
    uint64_t head;                /* position after the last byte that was taken; written by the
                                     taker */
    uint32_t taker_sleeps;        /* enum pg_ring_sleep: the taker waits for a message; set by the
                                     taker, cleared by the putter that wakes it */
    uint32_t pad2;
    uint64_t pad3[6];
};

struct pg_ring_pair {             /* the first bytes of the memory; at PG_RING_HEAD come the bytes of
                                     the submissions, then those of the completions */
    struct pg_ring submissions;   /* from the client to the daemon */
    struct pg_ring completions;   /* from the daemon to the client */
};
