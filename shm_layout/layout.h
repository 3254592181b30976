/*
 * layout.h - the one declaration of every shared byte of purgatoryd.
 *
 * The C core includes it; cffi parses it; Python, the docs' tables and every reader
 * of the wire derive their formats from it.  So it keeps to what cffi parses: literal
 * #defines, enums, fixed-width fields, explicit padding; no guard, no include.
 *
 * Rules of change.  Arena: a field that moves or changes its meaning raises PG_ABI_MAJOR; fields
 * appended to a struct, regions and extension kinds raise PG_ABI_MINOR, and pg_convert fills what
 * an earlier minor lacks with zeros.  It copies the rows of regions: a struct that stands inside
 * another one, or in a blob, cannot grow; what it lacks needs a region or an extension kind of its
 * own.  WAL: record types and parts behind a record raise
 * PG_WAL_MINOR; all else raises PG_WAL_MAJOR.  Wire: messages, flags and statuses may be
 * added; all else raises PG_WIRE_VERSION.  A reader takes its own version and earlier minors, and
 * refuses all others.  The layout id in the header is computed from all sizes and offsets below,
 * so two builds that disagree refuse each other even when a number was not raised.
 *
 * Numbers and fields marked "for" a feature have no other meaning, and are 0 or absent until that
 * feature uses them.  Fields named pad are 0 and keep the fields behind them aligned.
 *
 * Byte order is the host's (little endian is required and checked through the magic).
 * Times are int64 nanoseconds.  *_boot_ns is CLOCK_BOOTTIME, or virtual time under the
 * virtual clock; *_wall_ns is CLOCK_REALTIME.  Offsets are bytes from the start of the arena file.
 *
 * Two arena files.  The ARENA is written by the daemon alone (its group-commit thread writes its
 * fields of the WAL buffer) and mapped read-only by clients.  The PRIVATE arena file (sessions,
 * replies, the hash secret) is the daemon's. "Authoritative state" survives a crash; "derived" is
 * rebuilt from authoritative state at every attach.
 */

#define PG_MAGIC 0x31414e4552414750u     /* "PGARENA1" read as little endian */
#define PG_PRIVATE_MAGIC 0x3156495250474750u
#define PG_ABI_MAJOR 1
#define PG_ABI_MINOR 0

/* ---- limits -------------------------------------------------------------------- */

#define PG_KEY_MAX 255                   /* bytes of a key */
#define PG_PAYLOAD_MAX 65536             /* bytes of a payload */
#define PG_NAMESPACE_MAX 63              /* bytes of a namespace's name */
#define PG_TOPIC_MAX 127                 /* bytes of a topic's name */
#define PG_CAPACITY_MAX 134217728u       /* slots; index entries keep >= 4 tag bits */
#define PG_TICKET_MAX 72057594037927935u /* 2^56 - 1 */
#define PG_TICKET_SHARD 281474976710656u /* 2^48: ticket = shard * this + a number from 1 on */
#define PG_SHARDS_MAX 64                 /* shards of a deployment */
#define PG_GRANULE 16                    /* bytes; unit of blob references */
#define PG_NIL 4294967295u               /* no slot, no chunk, no blob */
#define PG_BATCH_RECORDS 1024            /* records in one batch */
#define PG_BATCH_NAMES 256               /* distinct namespace/topic pairs in one batch */
#define PG_MESSAGE_MAX 8388608           /* bytes of one request or reply */
#define PG_WINDOW 4                      /* batches of one session in flight */
#define PG_WORKER_MAX 63                 /* bytes of the name that a client gives itself */
#define PG_GRACE_MAX_NS 86400000000000   /* how long a session may outlive its client: a day */
#define PG_QUOTA_MAX 281474976710655u    /* of timers or bytes: 2^48 - 1 */
#define PG_QUOTA_OPS_MAX 1000000000u     /* operations per second */
#define PG_BULK_LOAD_ROW_MAX 9223372036854775807u /* number of a row in a bulk load */
#define PG_RESERVED 95                   /* '_': names that begin with it are for PUBLISH alone */

/* ---- the arena header ----------------------------------------------------------- */

#define PG_REGION_ALIGN 4096             /* bytes; where regions begin, unit of payload memory */

enum pg_region_id {
    PG_R_HOT, PG_R_COLD, PG_R_FREE_SLOTS, PG_R_WHEEL, PG_R_BUCKETS, PG_R_CHUNKS,
    PG_R_FREE_CHUNKS, PG_R_INDEX, PG_R_BLOB_HEAP, PG_R_BLOB_MAP, PG_R_BLOBS,
    PG_R_NAMESPACES, PG_R_TOPICS, PG_R_NAME_INDEX, PG_R_ACCOUNTS, PG_R_REPLAY_BUFFER,
    PG_R_METRICS, PG_R_PURGATORY, PG_R_WATCHES, PG_R_WATERMARKS, PG_R_WATERMARK_INDEX,
    PG_R_WAL_BUFFER,              /* length 0: an arena without a WAL */
    PG_R_TIMESTAMPS,              /* the same */
    PG_R_BULK_LOADS, PG_R_BULK_LOAD_BLOCKS, PG_R_BULK_LOAD_BITS, PG_R_BULK_LOAD_INDEX,
    PG_R_HISTOGRAMS,
    PG_R_CONSUMER_GROUPS,         /* for consumer groups: members, budgets, retry policy */
    PG_R_JOBS,                    /* for consumer groups: lease, attempt and holder of each job */
    PG_R_SCHEDULES,               /* for schedules: spec, template, next occurrence, revision */
    PG_R_CURSORS,                 /* for durable subscribers: committed position per cursor */
    PG_R_COUNT
};

enum pg_arena_state { PG_BLANK, PG_REBUILDING, PG_READY, PG_RETIRED };
enum pg_clock_kind {
    PG_CLOCK_BOOT,                /* CLOCK_BOOTTIME of the host */
    PG_CLOCK_VIRTUAL              /* moves by ADVANCE and at_ns alone */
};

/* What the daemon is doing, apart from whether its arena can be read. A killed one leaves the
 * state that it was in. */
enum pg_daemon_state {
    PG_D_STOPPED,                 /* serves no more, and ends cleanly */
    PG_D_STARTING,                /* takes its lock and binds its sockets */
    PG_D_RECOVERING,              /* attaches, rebuilds or makes the arena */
    PG_D_READY,
    PG_D_DEGRADED,                /* serves, but not as it should: enum pg_degraded says why */
    PG_D_DRAINING                 /* waits for what is armed, and arms nothing */
};
/* Why, added up; a draining daemon says so, too. */
enum pg_degraded {
    PG_WHY_WAL = 1,               /* the WAL has stopped: nothing is armed any more */
    PG_WHY_WAL_BUFFER = 2,        /* the disk is too slow: what is due waits for the WAL */
    PG_WHY_LATE = 4,              /* what is due waits for the loop */
    PG_WHY_TIMERS = 8,            /* nearly as many timers are armed as there are slots */
    PG_WHY_PAYLOADS = 16,         /* the payload memory is nearly full */
    PG_WHY_ARENA = 32             /* the arena files have lost their names: nothing is armed */
};

struct pg_region {
    uint64_t offset;
    uint64_t length;      /* bytes; 0 = this arena has no such region */
    uint32_t stride;      /* bytes of one element */
    uint32_t count;       /* elements */
};

/* What a placement can have. A set of them, one bit each, says what is in force or was refused. */
enum pg_placement_part {
    PG_PL_CPUS = 1,               /* its threads keep to CPUs */
    PG_PL_MEMORY = 2,             /* the arena is on one NUMA node */
    PG_PL_REALTIME = 4,           /* the loop runs under SCHED_FIFO */
    PG_PL_LOCK = 8,               /* memory stays in RAM */
    PG_PL_HUGE = 16,              /* the arena has huge pages */
    PG_PL_SPIN = 32,              /* the loop does not sleep shortly before a deadline */
    PG_PL_CORE = 64               /* it chose the core of its loop, and leaves it for a better
                                     one */
};
enum pg_placement_mode { PG_PLACE_NONE, PG_PLACE_AUTO, PG_PLACE_EXPLICIT, PG_PLACE_MODES };

/* Where the daemon runs. Numbers of nodes and CPUs are the kernel's + 1; 0 = any. */
struct pg_placement {
    uint32_t mode;                /* enum pg_placement_mode */
    uint32_t node;                /* of its threads */
    uint32_t memory_node;         /* of the arena: a client with numa_local=True runs there */
    uint32_t reaper_cpu;          /* of the loop: a client with numa_local=True leaves its core
                                     alone */
    uint32_t applied;             /* bits of enum pg_placement_part */
    uint32_t clamped;             /* the same: what was wanted and could not be had as a whole */
    uint32_t pages_sampled;
    uint32_t pages_elsewhere;     /* of them, on other nodes than memory_node */
};

/* Fixed at creation, except what is marked as moving. Daemon writes, all read. */
struct pg_header {
    uint64_t magic;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint64_t layout_id;
    uint64_t length;              /* bytes of the arena file */
    uint32_t page_size;
    uint32_t clock_kind;          /* enum pg_clock_kind */
    uint8_t  uuid[16];            /* this arena; the private arena file and the WAL repeat it */
    uint8_t  boot_id[16];         /* of the boot whose CLOCK_BOOTTIME the deadlines use */
    uint64_t stream_id;           /* changes only when continuity of notices is lost */
    uint64_t epoch;               /* +1 at every daemon start */
    uint32_t shard;               /* its number in the deployment; alone: 0 */
    uint32_t shards;              /* of the deployment; alone: 1 */
    uint32_t capacity;            /* slots */
    uint32_t replay_capacity;     /* entries, a power of two */
    uint64_t payload_bytes;       /* bytes of the blob region */
    uint64_t replay_bytes_max;    /* cap of blob bytes that fired entries may pin */
    uint64_t tick_ns;
    uint32_t fanout;
    uint32_t levels;
    int64_t  created_wall_ns;
    int64_t  wall_origin_ns;      /* virtual clock: wall time at virtual time 0 */
    uint32_t daemon_pid;          /* moving: set at start, 0 after a clean stop */
    uint32_t state;               /* moving: enum pg_arena_state, release */
    int64_t  heartbeat_boot_ns;   /* moving, real clock always */
    uint64_t loop_iterations;     /* moving: progress of the reaper loop */
    int64_t  now_ns;              /* moving: time of the last advance, on the arena's clock */
    int64_t  next_deadline_ns;    /* moving: lower bound of the next expiry; INT64_MAX = none */
    int64_t  wall_offset_ns;      /* moving: wall = the arena's clock + offset */
    uint64_t next_ticket;         /* authoritative; never reused; of this shard */
    uint64_t replay_tail;         /* authoritative: position after the newest entry, release */
    uint64_t replay_head;         /* authoritative: oldest position that is not withdrawn */
    uint64_t published;           /* authoritative: entries below were handed to the socket */
    uint64_t replay_bytes;        /* derived: blob bytes pinned by entries */
    uint64_t next_incarnation;    /* authoritative: for topics */
    uint64_t quota_timers;        /* moving: of every uid, as the daemon was started; 0 = none */
    uint64_t quota_bytes;         /* moving: the same */
    uint64_t quota_ops;           /* moving: the same, per second */
    uint32_t uid_share;           /* moving: per cent of each shared table that one uid may hold;
                                     0 or 100 = no limit */
    uint32_t own_uid;             /* moving: the daemon's, which has no such limit */
    struct pg_placement placement; /* moving: as the daemon was started, and since */
    uint32_t daemon_state;        /* moving: enum pg_daemon_state, release */
    uint32_t daemon_why;          /* moving: enum pg_degraded, added up; before daemon_state */
    int64_t  daemon_since_boot_ns; /* moving, real clock: of daemon_state; before it */
    uint64_t term;                /* for replication: the leader's term; alone: 0 */
    struct pg_region regions[40]; /* PG_R_COUNT of them, then space for later minors */
    uint64_t version;             /* written last at creation: PG_MAGIC once all is in place */
};

/* Counters, derived from nothing and lost with the arena. Daemon writes, all read. */
struct pg_metrics {
    uint64_t adds;                /* timers armed, replacements included */
    uint64_t replaces;
    uint64_t extends;
    uint64_t cancels;             /* that found an armed timer */
    uint64_t cancels_fired;
    uint64_t cancels_unknown;
    uint64_t expiries;
    uint64_t notices_withdrawn;   /* overwritten or withdrawn for their bytes */
    uint64_t refused_full;        /* slots */
    uint64_t refused_payload;     /* blob bytes */
    uint64_t refused_names;       /* namespaces or topics */
    uint64_t refused_other;
    uint64_t batches;
    uint64_t batches_repeated;    /* answered from the session's memory */
    uint64_t batches_refused;
    uint64_t records;
    uint64_t live;                /* armed timers now (derived) */
    uint64_t live_wall;           /* of them, absolute wall deadlines (derived) */
    uint64_t blob_bytes;          /* granules in use, in bytes (derived) */
    uint64_t moved;               /* timers re-placed by cascades and gradual drain */
    uint64_t wakeups;
    uint64_t messages_sent;       /* notice messages */
    uint64_t watches;             /* operations armed */
    uint64_t operations;          /* armed now (derived) */
    uint64_t outcomes;            /* ended and not acknowledged (derived) */
    uint64_t satisfied;
    uint64_t expired;             /* operations; `expiries` counts timers */
    uint64_t failed;
    uint64_t cancelled;           /* operations, by their own key or FOR_KEY */
    uint64_t already_true;        /* satisfied only by the look at expiry */
    uint64_t checks;              /* asked of owners of CLIENT conditions */
    uint64_t advances;
    uint64_t visits;              /* watchers looked at by advances */
    uint64_t refused_busy;        /* the owner's inbox is full, or a replay buffer of unsent
                                     notices */
    uint64_t refused_keys;        /* watch keys or watch records */
    uint64_t refused_denied;      /* the namespace has another owner */
    uint64_t refused_quota;       /* of the namespace or the uid, and no account left */
    uint64_t refused_wal;         /* the WAL buffer was too full, or the WAL stopped */
    uint64_t bulk_loads;          /* that are remembered (derived) */
    uint64_t bulk_load_blocks;    /* of their rows, in use (derived) */
    uint64_t bulk_load_rows;      /* that were done */
    uint64_t bulk_load_rows_repeated; /* that came again */
    uint64_t refused_bulk_loads;  /* no free slots for a bulk load or for its rows */
    uint64_t refused_fenced;      /* rows of a bulk load that is closed, or of an older run of it */
    uint64_t parked;              /* timers without their payloads now (derived) */
    uint64_t parks;
    uint64_t unparks;
    uint64_t iterations;          /* advances of the wheel */
    uint64_t iterations_full;     /* of them, those that used up their budget */
    uint64_t outcomes_repeated;   /* and CHECKs: sent again, unacknowledged */
    uint64_t records_redone;      /* of the WAL, when the arena was made of it */
    uint64_t refused_exists;      /* PUT error, WATCH: the key is armed */
    uint64_t refused_stopping;    /* the daemon drains */
    uint64_t iteration_work;      /* timers moved or fired, by iterations that had any */
    uint64_t iteration_budget;    /* how many those iterations might have */
    uint64_t log_dropped;         /* log messages that were not written */
    uint64_t outcomes_dropped;    /* freed because their owner's session had ended */
};

/* ---- histograms ----------------------------------------------------------------- */

/* What is measured, each in ns. */
enum pg_histogram_id {
    PG_HG_STRUCTURAL_LATENESS,    /* a timer's or an operation's deadline until it fired */
    PG_HG_WAKEUP_LATENESS,        /* when the loop was to wake up until it ran */
    PG_HG_BATCH_SERVICE,          /* a batch's application began until its answer was there */
    PG_HG_REQUEST_QUEUE,          /* a batch was received until its application began */
    PG_HG_LOCAL,                  /* the loop worked on a batch, in all calls that it took */
    PG_HG_REMOTE,                 /* a timer or an operation was armed until it ended, in any way */
    PG_HG_RESPONSE_QUEUE,         /* a timer, an operation or the work on a message ended, or a
                                     notice was published, until that began to be sent */
    PG_HG_SEND,                   /* from there until the socket had it */
    PG_HISTOGRAMS
};

/* Bucket b < 16 counts the value b. Behind them, eight to a power of two, bucket b counts the
 * values from m << s to ((m + 1) << s) - 1, with s = b / 8 - 1 and m = b - 8 * s: a bucket's end
 * is at most an eighth above any of its values. */
#define PG_HISTOGRAM_BUCKETS 488         /* up to 2^63 - 1 */

/* Counted since the arena's birth, and derived from nothing. Daemon writes, all read, without any
 * order between the fields. */
struct pg_histogram {
    uint64_t sum_ns;              /* of all values, modulo 2^64 */
    uint64_t sum_high;            /* what is above */
    uint64_t max_ns;
    uint64_t counts[488];
};

/* ---- timers --------------------------------------------------------------------- */

/* States of a slot: the low 8 bits of its control word.
 *   FREE -> ARMED (put) -> FREE (cancelled; or fired, once its replay buffer entry is written)
 *   FREE -> PARKED (put, far off) -> ARMED (unpark) or FREE (cancelled)
 * A parked timer has its key alone, and no place in the wheel: its payload is in the WAL. */
enum pg_slot_state { PG_S_FREE, PG_S_ARMED, PG_S_OUTCOME, PG_S_PARKED };
/* An operation: FREE -> ARMED (watch) -> OUTCOME (ended) -> FREE (acknowledged). */

enum pg_slot_flag {
    PG_F_WALL = 1,                /* absolute wall deadline in the blob's extension */
    PG_F_EXT = 2,                 /* the blob begins with extension items */
    PG_F_OPERATION = 4,           /* a purgatory operation: struct pg_operation in the blob */
    PG_F_BULK_LOADED = 8          /* it came as the row of a bulk load */
};

/* 32 bytes, two to a cache line. Fields first, ctl last (release). Readers load ctl
 * (acquire), copy, and trust the copy only if ctl is unchanged. */
struct pg_hot {
    uint64_t ctl;                 /* ticket << 8 | enum pg_slot_state */
    int64_t  deadline_ns;         /* on the arena's clock */
    uint32_t where;               /* derived: chunk * 16 + cell of the wheel */
    uint16_t bucket;              /* derived: bucket of the wheel */
    uint16_t flags;               /* enum pg_slot_flag */
    uint32_t hash;                /* of namespace, key type and key, with the arena's secret */
    uint16_t topic;               /* row of the topic table, which names the namespace */
    uint16_t wait_low;            /* of a timer's wait, see below */
};

/* 16 bytes at the same index; written before hot.ctl. A timer's wait, from its arming to its
 * deadline, says when it was armed: the two halves of a float, in ns. Any value is sound. */
struct pg_cold {
    uint32_t blob;                /* granule; layout: extension, key, payload */
    uint32_t payload_len;         /* 0..65536 */
    uint8_t  key_len;             /* 1..255 */
    uint8_t  key_type;            /* enum pg_key_type */
    uint16_t ext_len;             /* bytes, a multiple of 16 */
    uint16_t account;             /* whose it is: row of the account table + 1; 0 = nobody's */
    uint16_t wait_high;
};

/* Authoritative, of an arena with a WAL: what the record of a timer's or an operation's end tells
 * of its beginning. It stands at the slot's index, written before hot.ctl, and behind all else in
 * the records of beginning and end. 56 bytes. */
struct pg_timestamps {
    uint64_t add_lsn;             /* of its ARM or WATCH; 0 = not known */
    uint64_t session;             /* of who asked for it; 0 = no message did */
    int64_t  sent_boot_ns;        /* its client packed the batch, by the client's clock; 0 = not
                                     reported */
    int64_t  received_boot_ns;    /* real clock: the daemon took the batch from the socket; 0 =
                                     none */
    int64_t  applied_boot_ns;     /* real clock: the daemon began to apply the batch */
    int64_t  armed_ns;            /* on the arena's clock */
    int64_t  done_boot_ns;        /* real clock: the call that armed it returned; 0 = not known, as
                                     in the record of the beginning. Only measured, never relied
                                     on */
};

enum pg_key_type {
    PG_KEY_STR,                   /* UTF-8 text */
    PG_KEY_BYTES,                 /* bytes */
    PG_KEY_UUID,                  /* 16 bytes */
    PG_KEY_TYPES
};

/* One item of a blob's extension, 16 bytes each: what few timers use. */
enum pg_ext_kind {
    PG_EXT_WALL = 1,              /* value: the wall deadline, ns */
    PG_EXT_TAG,                   /* for bulk operations: value: hash of the timer's tag */
    PG_EXT_SLACK,                 /* for spread deadlines: value: how much later it may fire, ns */
    PG_EXT_SCHEDULE               /* for schedules: extra: row of the schedule */
};
struct pg_ext {
    uint32_t kind;                /* enum pg_ext_kind */
    uint32_t extra;
    int64_t  value;
};

/* ---- the wheel (derived) -------------------------------------------------------- */

#define PG_WHEEL_LEVELS 64
#define PG_DUE_BUCKETS 3         /* of what is due, behind all rings */
#define PG_CHUNK_CELLS 15

struct pg_chunk {                 /* one cache line; a bucket is a chain of them */
    uint32_t previous;            /* tail of the bucket before this chunk; PG_NIL = none */
    uint32_t slots[15];
};

struct pg_bucket {
    uint32_t tail;                /* cell of the newest member, chunk * 16 + 1..15; PG_NIL =
                                     empty */
    uint32_t count;
};

/* A ring of 2 x fanout buckets, each `width` ticks wide: the block of buckets in which the
 * clock stands, and the next block. Level 0 has the finest buckets, of one tick. */
struct pg_level {
    uint64_t limit;               /* the first deadline tick that is too far for this level */
    uint64_t origin;              /* tick of position 0, of the ring in which the clock stands */
    uint64_t start;               /* tick at which the clock's bucket begins */
    uint64_t width;               /* fanout ^ level */
    uint64_t multiplier;          /* with shift: division by width */
    uint32_t shift;
    uint32_t first;               /* number of the bucket at position 0 */
    uint64_t summary;             /* bit i: occupied[i] is not 0 */
    uint64_t occupied[8];         /* a bit per position: its bucket has members */
    uint32_t here;                /* position of the clock's bucket */
    uint32_t pad;
};

/* PG_DUE_BUCKETS more stand behind those of all rings. Two hold timers which were due when they
 * came: one takes the newcomers while the other is fired. The third holds operations that are due and
 * wait after an outage. */
struct pg_wheel {
    uint64_t clock;               /* tick whose bucket was fired last or is being fired */
    uint64_t drained;             /* tick up to which gradual draining is done */
    uint64_t occupied;            /* bit l: level l has members */
    uint64_t moved;               /* timers moved to a finer level since init */
    int64_t  tick_ns;
    uint64_t multiplier;          /* with shift: division by tick_ns */
    uint32_t shift;
    uint32_t ring;                /* buckets of one level: 2 x fanout */
    uint32_t level_count;
    uint32_t due;                 /* number of the first of these buckets */
    uint32_t open;                /* 0 or 1: the due bucket that takes newcomers */
    uint32_t closing;             /* 1: the other one belongs to this tick, and may have members */
    uint32_t chunk_count;
    uint32_t pad;
    struct pg_level levels[64];
};

/* ---- blobs (their bytes are authoritative; heap and map are derived) --------------------- */

/* Size classes of free blocks: 28 first levels (powers of two) of 32 equal steps each.
 * Blocks below 64 granules have a class per size. */
#define PG_BLOB_FIRST_LEVELS 28
#define PG_BLOB_CLASSES 896

struct pg_blob_heap {
    uint32_t first;               /* bit f: second[f] != 0 */
    uint32_t used;                /* granules */
    uint32_t free_blocks;
    uint32_t second[28];          /* bit s of [f]: heads[f * 32 + s] != PG_NIL */
    uint32_t heads[896];          /* first free block of each class; PG_NIL = none */
};

/* What a granule of a free block holds: size, next and previous in its first granule,
 * size_at_end in its last, which may be the same one. Readers never look at them. */
struct pg_blob_free {
    uint32_t size;                /* granules */
    uint32_t next;                /* of the same class; PG_NIL = none */
    uint32_t previous;
    uint32_t size_at_end;
};

/* ---- the key index (derived) ----------------------------------------------------- */

#define PG_INDEX_CELLS 15

/* One cache line. An id is a slot, or capacity + ring position of a replay buffer entry; the
 * bits above the id hold as many bits of the hash as fit (a tag). 0 = empty cell. */
struct pg_index_bucket {
    uint32_t overflowed;          /* ids that found this bucket full and stand further on */
    uint32_t cells[15];
};

/* ---- the purgatory ----------------------------------------------------------------- */

#define PG_WATCH_KEYS_MAX 1024
#define PG_WATERMARK_MAX 9223372036854775807u
#define PG_TARGET_MAX 9223372036854775806u   /* of ALL, ANY and QUORUM */

/* Authoritative but for root, first, latest and place. A watch key: its monotone watermark and its
 * watchers, which stand in a treap ordered by the watermark that each of them waits for. 64
 * bytes. */
struct pg_watched {
    uint64_t watermark;           /* stored (release) before any watcher is visited */
    uint8_t  key[16];             /* its bytes; of a longer one the granule of its blob, u32; free
                                     row: those behind the next one, u32 each: guesses */
    uint32_t hash;
    uint32_t error;               /* sticky until cleared; 0 = none */
    uint32_t root;                /* derived; free row: the next free one */
    uint32_t first;               /* derived: the watcher with the lowest target */
    uint32_t latest;              /* derived: the one with the highest, for rising targets */
    uint32_t touched_s;           /* real clock: last change or last watcher; PG_NIL = forgotten as
                                     soon as nobody watches, which a further watcher does not change */
    uint16_t namespace_row;
    uint8_t  key_len;             /* 0 = row not used; written last */
    uint8_t  key_type;
    uint32_t place;               /* derived: where the watermark index has it, bucket * 16 +
                                     cell */
    uint16_t account;             /* of the uid whose record created it, as in pg_cold */
    uint8_t  pad[6];
};

/* Authoritative: key_row, slot, sibling; target too for ALL, ANY and QUORUM, read through
 * watch_target(). One key of one operation. */
struct pg_watch {
    uint64_t target;              /* visited once the key's watermark is at least this */
    uint32_t key_row;             /* row of the watch key */
    uint32_t slot;                /* the operation; PG_NIL = record not used */
    uint32_t left, right, parent; /* derived: the treap; of free records guesses */
    uint32_t sibling;             /* next key of the operation; free record: the next free one */
};

/* Derived: heads and counts of the free lists. */
struct pg_purgatory {
    uint32_t free_watch, free_watches;
    uint32_t free_watermark, free_watermarks;
    uint64_t watermark_ttl_ns;    /* fixed at creation */
    uint64_t inbox_max;           /* fixed at creation: operations of a session, armed or not
                                     acknowledged */
};

enum pg_condition {
    PG_C_ALL,                     /* each key reaches its target */
    PG_C_ANY,                     /* one key reaches its target */
    PG_C_SUM,                     /* what the keys gained, up to a cap each, reaches a sum */
    PG_C_CLIENT,                  /* the owner decides: it gets a CHECK when a key has advanced */
    PG_C_QUORUM,                  /* so many keys reach their targets */
    PG_CONDITIONS
};
enum pg_check_state { PG_K_NONE, PG_K_ASKED, PG_K_MOVED };

/* The first 80 bytes of an operation's blob. Behind it what its end notes of its keys: a uint64_t
 * for each with its watermark, a bitmap of those that were missing, (keys + 7) / 8 bytes, bit n =
 * the n-th key, and one of those that had failed. Then another one of its own keys, if it has any;
 * zeros up to a multiple of 16 bytes. Then for SUM a struct pg_share per key, key, payload. */
struct pg_operation {
    uint64_t session;             /* the owner's */
    uint64_t threshold;           /* SUM; QUORUM: keys that have to reach their targets */
    int64_t  armed_ns;
    int64_t  ended_ns;
    uint64_t version;             /* CLIENT: of the last CHECK; upper half from the ticket, so that
                                     a late answer is never for the key's next operation */
    uint32_t first_watch;
    uint32_t notice_blob;         /* key, verdict, payload for the topic; PG_NIL = not asked for */
    uint32_t inbox_next, inbox_previous; /* derived: slots */
    uint32_t error;
    uint32_t unmet;               /* derived; ALL, QUORUM: keys that still have to reach their
                                     targets */
    uint16_t keys;
    uint8_t  condition;           /* enum pg_condition */
    uint8_t  cause;               /* enum pg_cause once ended; 0 = armed */
    uint8_t  check;               /* enum pg_check_state */
    uint8_t  in_inbox;            /* derived */
    uint8_t  has_own;             /* 1 = the bitmap of own keys is there */
    uint8_t  notified;            /* 1 = the owner's socket had its outcome before */
    uint32_t uid;                 /* the owner's; PG_NIL = unknown */
    uint8_t  pad[4];              /* the blob goes on at a whole granule */
};

struct pg_share {                 /* of one key in a SUM: min(cap, max(0, watermark - base)) */
    uint64_t base;
    uint64_t cap;
};

/* Begins the payload of an operation's notice (PG_E_OPERATION), before the bitmap of
 * missing keys and the operation's own payload. */
struct pg_verdict {
    int64_t  elapsed_ns;          /* from arming to the end */
    uint32_t error;               /* code with which a key failed; 0 = none */
    uint16_t keys;                /* watch keys */
    uint16_t bitmap_bytes;        /* of the bitmap of missing keys, which stands behind */
};

/* ---- names ---------------------------------------------------------------------- */

/* Not authoritative: what a quota of operations has left, full after every start. A second fills
 * it. */
struct pg_tokens {
    uint64_t left;                /* 10^9 are one operation */
    int64_t  refilled_boot_ns;    /* real clock: when `left` was true; 0 = it is full */
};

/* Authoritative. A row is born once and its name never changes. */
struct pg_namespace {
    uint32_t name_len;            /* 0 = row not used; written last, release */
    uint32_t shard;               /* placement, recorded at birth */
    uint32_t owner_uid;           /* PG_NIL = anybody */
    uint32_t durability;          /* 0 memory, 1 durable */
    uint64_t live;                /* derived: armed timers */
    uint64_t bytes;               /* derived: blob bytes of armed timers */
    uint64_t quota_timers;        /* 0 = none */
    uint64_t quota_bytes;         /* 0 = none */
    uint64_t quota_ops;           /* per second; 0 = none */
    struct pg_tokens tokens;
    uint64_t park_beyond_ns;      /* what is due later than that is parked; 0 = nothing is */
    uint32_t created_uid;         /* whose record or message created it; PG_NIL = nobody's */
    uint32_t pad;
    char     name[64];
};

/* Authoritative. `sequence` counts the topic's notices. It is stored after the entry's commit,
 * which alone decides; a rebuild rolls a topic forward to the newest committed entry. */
struct pg_topic {
    uint32_t name_len;            /* 1 + length; 0 = row not used; written last, release */
    uint32_t namespace_row;
    uint64_t incarnation;         /* identity of this row while it is used */
    uint64_t sequence;            /* of the newest notice; the first has 1 */
    uint64_t last_position;       /* replay buffer position + 1 of the newest notice; 0 = none */
    int64_t  changed_boot_ns;     /* real clock: when the newest notice was built */
    uint64_t live;                /* derived: armed timers */
    int64_t  slack_ns;            /* for spread deadlines: how much later its timers may fire */
    uint32_t created_uid;         /* as in pg_namespace */
    uint32_t pad;
    char     name[128];
};

/* Authoritative but for its counts and tokens: a uid that has sessions, timers or watch keys. A row
 * whose uid has none of them may be given to another uid. */
struct pg_account {
    uint32_t uid;
    uint32_t in_use;              /* 0 = row not used; written last */
    uint64_t live;                /* derived: armed timers, over all namespaces */
    uint64_t bytes;               /* derived: blob bytes of armed timers */
    struct pg_tokens tokens;
    int64_t  used_boot_ns;        /* real clock: when it last sent a batch or opened a session */
    uint32_t sessions;            /* derived: open */
    uint32_t watch_keys;          /* derived: that its records created */
    uint32_t watches;             /* derived: watch records of its armed operations */
    uint32_t operations;          /* derived: that its open sessions own, armed or not
                                     acknowledged */
};

/* ---- bulk loads ---------------------------------------------------------------------- */

#define PG_BULK_LOAD_BLOCK_ROWS 4096

enum pg_bulk_load_state {
    PG_BULK_LOAD_NONE,            /* no such bulk load */
    PG_BULK_LOAD_OPEN,            /* takes rows */
    PG_BULK_LOAD_CLOSED           /* takes no more rows */
};

/* Authoritative, but for the fields that say otherwise. A bulk load: which of its rows were done,
 * whatever became of their timers since. 64 bytes. */
struct pg_bulk_load {
    uint8_t  id[16];              /* chosen by who loads; not 0 */
    uint64_t fencing_token;       /* the newest run that is known: older ones are refused */
    int64_t  used_boot_ns;        /* real clock */
    uint64_t rows;                /* derived: done */
    uint64_t upto;                /* derived: behind the highest row that is done */
    uint32_t uid;                 /* who began it, and alone may go on */
    uint32_t namespace_row;
    uint32_t state;               /* enum pg_bulk_load_state; NONE = row not used; written last */
    uint32_t blocks;              /* derived: of its rows */
};

/* Authoritative. Rows number * PG_BULK_LOAD_BLOCK_ROWS and those that follow, of one bulk load; a
 * bit for each stands at the same index of PG_R_BULK_LOAD_BITS, and is set after the row's effect.
 * 16 bytes. */
struct pg_bulk_load_block {
    uint64_t number;              /* of a free one: the next free one */
    uint32_t bulk_load;           /* row of the bulk load + 1; 0 = not used; written last */
    uint32_t pad;
};

/* ---- the replay buffer (authoritative) ---------------------------------------------------- */

enum pg_cause {
    PG_CAUSE_EXPIRED = 1,         /* the deadline came */
    PG_CAUSE_SATISFIED,           /* an operation's condition came true */
    PG_CAUSE_FAILED,              /* its keys have failed so that it cannot come true */
    PG_CAUSE_CANCELLED,           /* an operation was cancelled */
    PG_CAUSE_PUBLISHED            /* a notice without a timer */
};

enum pg_entry_flag {
    PG_E_SUPERSEDED = 1,          /* its key was armed again: cancel no longer answers FIRED */
    PG_E_LATE = 2,                /* was due before the daemon's last start, and armed before it */
    PG_E_OPERATION = 4            /* an operation ended: the payload begins with its verdict */
};

/* 64 bytes. Written before the slot is freed; `commit` last (release). To withdraw:
 * commit = 0 (release), then free the blob. Readers copy the entry, check bounds, copy
 * the blob, and trust both only if commit is unchanged. */
struct pg_entry {
    uint64_t commit;              /* position + 1; 0 = withdrawn */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause */
    int64_t  deadline_ns;
    int64_t  fired_ns;
    uint64_t sequence;            /* in its topic */
    uint64_t previous;            /* replay buffer position + 1 of the topic's notice before; 0 =
                                     none */
    uint32_t blob;                /* granule */
    uint32_t payload_len;         /* 0..65536 */
    uint32_t hash;
    uint16_t topic;
    uint8_t  key_len;
    uint8_t  meta;                /* key type in bits 0-3, enum pg_entry_flag in bits 4-7 */
};

/* ---- the WAL ------------------------------------------------------------------ */

/* What happened, as absolute results, in frames. They are written to the WAL buffer, a ring in the
 * arena, before the effect that each describes; the group-commit thread copies them from there to
 * WAL segments. Snapshot and export files hold frames of the same form. */

#define PG_WAL_BUFFER_HEAD 4096               /* bytes before the ring in PG_R_WAL_BUFFER */
#define PG_WAL_BUFFER_MIN 4194304             /* bytes of the ring, a power of two */
#define PG_WAL_BUFFER_MAX 1073741824
#define PG_WAL_FRAME_MAX 131072            /* bytes; no frame is longer */
#define PG_WAL_SEGMENT_MAGIC 0x31304c4157475050u  /* "PPGWAL01" read as little endian */
#define PG_SNAPSHOT_MAGIC 0x3150414e53475050u /* "PPGSNAP1" */
#define PG_WAL_MAJOR 1
#define PG_WAL_MINOR 0
#define PG_WAL_SEGMENT_HEAD 4096             /* bytes before the first frame of a file */
#define PG_WAL_SEGMENT_MIN 262144            /* bytes of a WAL segment */
#define PG_GROUP_HEAD 80                 /* bytes of a GROUP frame */
#define PG_GROUP_MAX 1048576             /* bytes of a group, its GROUP frame included */

enum pg_wal_state { PG_WAL_NONE, PG_WAL_RUNNING, PG_WAL_STOPPED };
/* The system call that stopped it. */
enum pg_storage_call { PG_CALL_NONE, PG_CALL_OPEN, PG_CALL_FALLOCATE, PG_CALL_WRITE,
                       PG_CALL_SYNC, PG_CALL_RENAME, PG_CALL_SYNC_DIR };

/* At the start of PG_R_WAL_BUFFER. Positions count bytes since birth; a position's place in the
 * ring is position % size. committed <= tail <= appended <= committed + size. */
struct pg_wal_buffer {
    uint64_t size;                /* bytes of the ring; fixed at creation */
    uint64_t appended;            /* authoritative, daemon: end of the newest frame */
    uint64_t tail;                /* authoritative, daemon, release: end of the newest frame whose
                                     effect is done. At most one frame stands between tail and
                                     appended */
    uint64_t next_lsn;            /* authoritative, daemon: of the next frame; stored after
                                     `appended` */
    uint64_t pad0[4];             /* the group-commit thread's fields have cache lines of their
                                     own */
    uint64_t committed;           /* group commit, release: up to here all is on disk, and its
                                     bytes of the ring are free */
    uint64_t committed_lsn;       /* group commit, release: of the newest frame on disk; 0 = none */
    uint32_t state;               /* group commit, release: enum pg_wal_state */
    uint32_t error;               /* errno of the call that stopped it; before `state` */
    uint32_t call;                /* enum pg_storage_call; before `state` */
    uint32_t began_empty;         /* authoritative, daemon: 1 = the arena held nothing before record
                                     1; stored at each start until that is appended */
    uint64_t error_lsn;           /* the first that did not get to disk; before `state` */
    uint64_t group;               /* group commit: number of the newest group on disk */
    uint64_t segment;             /* group commit: first LSN of the segment that it writes */
    uint64_t syncs;               /* group commit: fdatasync calls that returned well */
    uint64_t sync_ns;             /* group commit: the time that they took together */
    uint64_t bytes;               /* group commit: bytes written */
};

/* Every frame begins with these 24 bytes. Its number, the LSN, is that of the frame before
 * plus 1; PAD, GROUP and SEAL take none and repeat that of the frame before. In the ring crc,
 * salt and group are 0: the group-commit thread fills them in. */
struct pg_frame_head {
    uint32_t bytes;               /* of the whole frame, a multiple of 8 */
    uint32_t crc;                 /* CRC32C of the frame without this field */
    uint64_t lsn;
    uint32_t salt;                /* of its file: stale bytes of another one do not parse */
    uint16_t type;                /* enum pg_wal_type */
    uint16_t group;               /* low 16 bits of its group's number */
};

/* Behind the head stands the struct of the type, behind that what the comment says, and
 * zeros up to a multiple of 8. Then a pg_timestamps stands at the end of ARM, WATCH, END, FIRE and
 * OUTCOME; in an ARM that replaces a timer that one's stands before it. Before these stands a
 * pg_asked in END, and in such an ARM. They are there if the frame is longer by them: there are
 * none in what an arena without a WAL exports. */
enum pg_wal_type {
    PG_WAL_PAD = 1,               /* the rest of the ring before its end; never in a file */
    PG_WAL_COMMIT_GROUP,          /* files: pg_wal_group, first in each commit */
    PG_WAL_SEAL,                  /* files: nothing; behind the last group */
    PG_WAL_NAMESPACE,             /* pg_wal_namespace, name */
    PG_WAL_TOPIC,                 /* pg_wal_topic, name */
    PG_WAL_ARM,                   /* pg_wal_arm, pg_wal_row if in_bulk_load, key, payload: a timer,
                                     or one that replaces another */
    PG_WAL_MOVE,                  /* pg_wal_move, pg_wal_row if in_bulk_load: extended */
    PG_WAL_END,                   /* pg_wal_end: cancelled, or an outcome acknowledged or
                                     dropped */
    PG_WAL_FIRE,                  /* pg_wal_fire: became a replay buffer entry */
    PG_WAL_SENT,                  /* pg_wal_sent: notices were handed to the socket */
    PG_WAL_WATCH,                 /* pg_wal_watch, a pg_wal_watch_key per watch key, key, payload */
    PG_WAL_WATERMARK,             /* pg_wal_watermark, at birth the key: a watch key's watermark or
                                     error */
    PG_WAL_GONE,                  /* pg_wal_gone: a watch key was forgotten */
    PG_WAL_OUTCOME,               /* pg_wal_outcome, bitmap of missing keys: an operation ended */
    PG_WAL_SESSION,               /* pg_wal_session: a session ended; an END follows for each of
                                     its outcomes */
    PG_WAL_HEAD,                  /* snapshots, first: pg_wal_head */
    PG_WAL_ENTRY,                 /* pg_wal_entry, key, payload: a notice that was published; in
                                     snapshots, any that was not sent yet */
    PG_WAL_LAST,                  /* snapshots, last: pg_wal_last */
    PG_WAL_OPENED,                /* pg_wal_opened, name: a session began */
    PG_WAL_REPLIED,               /* pg_wal_replied: answers were handed to the socket */
    PG_WAL_BULK_LOAD,             /* pg_wal_bulk_load: a bulk load began, was fenced, closed or
                                     forgotten */
    PG_WAL_DONE,                  /* pg_wal_done: a row of a bulk load was done without a new
                                     timer */
    PG_WAL_BLOCK,                 /* snapshots: pg_wal_block: which rows of a bulk load were done */
    PG_WAL_UNPARK,                /* pg_wal_unpark, pg_wal_row if in_bulk_load, key, payload: what
                                     was parked is armed */
    PG_WAL_METRICS,               /* pg_wal_metrics, its pg_wal_histogram, all their pg_wal_bucket:
                                     once a minute */
    PG_WAL_TYPES
};
/* Numbers that are taken for later; a reader of this version refuses them. */
enum pg_wal_type_later {
    PG_LATER_BATCH = 64,          /* for replication: a session's sequence and the statuses of its
                                     newest batch, in the same group as their effects */
    PG_LATER_CONSUMER_GROUP,      /* for consumer groups: created, changed or deleted */
    PG_LATER_LEASE,               /* for consumer groups: job, member, attempt, end of the lease */
    PG_LATER_JOB,                 /* for consumer groups: acknowledged, retried or dead */
    PG_LATER_SCHEDULE,            /* for schedules: put, fired or deleted, with its next
                                     occurrence */
    PG_LATER_CURSOR               /* for durable subscribers: the position that was committed */
};

struct pg_wal_group {
    uint64_t number;              /* that of the group before + 1 */
    uint64_t bytes;               /* of the frames that follow in this group */
    int64_t  boot_ns;             /* the arena's clock and the wall clock, read together */
    int64_t  wall_ns;
    uint64_t term;                /* for replication: of the leader that wrote it; alone: 0 */
    uint8_t  origin[16];          /* boot id of the host on whose clock its times are */
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
    uint32_t created_uid;         /* as in pg_namespace */
    uint32_t name_len;
};

struct pg_wal_topic {
    uint64_t incarnation;
    uint64_t sequence;            /* 0 at birth */
    uint64_t last_position;       /* 0 at birth */
    int64_t  slack_ns;            /* as in pg_topic */
    uint32_t row;
    uint32_t namespace_row;
    uint32_t created_uid;         /* as in pg_topic */
    uint32_t name_len;
};

struct pg_wal_row {                 /* of a bulk load */
    uint8_t  bulk_load[16];
    uint64_t row;
};

struct pg_wal_arm {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  wall_ns;             /* absolute wall deadline; INT64_MIN = none */
    int64_t  armed_ns;
    uint64_t replaced;            /* ticket of the timer that it replaces; 0 = none */
    uint32_t slot;
    uint32_t replaced_slot;
    uint32_t topic;               /* row */
    uint32_t uid;                 /* of who asked for it; PG_NIL = nobody's message */
    uint32_t payload_len;
    uint8_t  counted;             /* 1 = in the account of that uid */
    uint8_t  in_bulk_load;        /* 1 = the row of a bulk load: a pg_wal_row stands before the
                                     key */
    uint8_t  key_len;
    uint8_t  key_type;
    uint32_t parked;              /* 1 = is parked: the payload is nowhere but here; in snapshots
                                     there is none */
    uint32_t bulk_loaded;         /* 1 = came as the row of a bulk load, in snapshots too */
    int64_t  armed_boot_ns;       /* real clock; 0 in snapshots */
    uint32_t ext_len;             /* for tag, slack and schedule: bytes of the struct pg_ext that
                                     stand before the key; 0 */
    uint32_t pad;
};

struct pg_wal_unpark {              /* as in pg_wal_arm, where nothing is said */
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  wall_ns;
    int64_t  at_ns;
    uint32_t slot;
    uint32_t topic;
    uint32_t uid;                 /* that it counts for; PG_NIL = none */
    uint32_t payload_len;
    uint8_t  counted;
    uint8_t  in_bulk_load;
    uint8_t  key_len;
    uint8_t  key_type;
    uint32_t bulk_loaded;
    uint32_t ext_len;             /* as in pg_wal_arm */
    uint32_t pad;
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

/* Of a timer that ended because somebody asked for it. 32 bytes. */
struct pg_asked {
    uint64_t session;             /* of who asked; 0 = no batch did */
    uint64_t sequence;            /* of the batch: its REPLIED tells of the answer */
    int64_t  deadline_ns;         /* on the arena's clock */
    uint32_t bulk_loaded;         /* 1 = it had come as the row of a bulk load */
    uint32_t pad;
};

/* DROPPED: an outcome was freed because its owner's session had ended. */
enum pg_end_cause { PG_END_CANCELLED = 1, PG_END_ACKNOWLEDGED, PG_END_DROPPED };
struct pg_wal_end {
    uint64_t ticket;
    int64_t  at_ns;
    uint32_t slot;
    uint32_t cause;               /* enum pg_end_cause */
    uint32_t uid;
    uint32_t topic;
    int64_t  ended_boot_ns;       /* real clock */
};

struct pg_wal_fire {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  fired_ns;
    uint64_t position;            /* in the replay buffer */
    uint64_t sequence;            /* in the topic */
    uint64_t previous;            /* of the entry: replay buffer position + 1 of the one before; 0 =
                                     none */
    uint32_t slot;
    uint32_t topic;
    uint32_t flags;               /* enum pg_entry_flag */
    uint32_t bulk_loaded;         /* 1 = it had come as the row of a bulk load */
    int64_t  ended_boot_ns;       /* real clock */
};

struct pg_wal_sent {
    uint64_t from;                /* replay buffer positions, without `upto` */
    uint64_t upto;
    int64_t  built_ns;            /* on the arena's clock */
    int64_t  handed_boot_ns;      /* real clock: the socket had all of them */
    int64_t  built_boot_ns;       /* real clock */
};

struct pg_wal_watch {
    uint64_t ticket;
    int64_t  deadline_ns;
    int64_t  armed_ns;
    uint64_t threshold;           /* SUM */
    uint64_t session;             /* the owner's */
    uint32_t slot;
    uint32_t topic;
    uint32_t uid;
    uint32_t payload_len;
    uint16_t keys;
    uint8_t  condition;           /* enum pg_condition */
    uint8_t  notice;              /* 1 = a notice to the topic, too */
    uint8_t  key_len;
    uint8_t  key_type;
    uint8_t  counted;             /* as in pg_wal_arm */
    uint8_t  pad;
};
struct pg_wal_watch_key {
    uint64_t target;              /* ALL, ANY, QUORUM; 2^64 - 1: is reached */
    uint64_t base;                /* SUM */
    uint64_t cap;                 /* SUM */
    uint32_t row;                 /* of the watch key */
    uint32_t flags;               /* enum pg_watch_key_flag */
};

enum pg_watermark_flag { PG_WM_BORN = 1, PG_WM_FORGOTTEN = 2 };
struct pg_wal_watermark {
    uint64_t watermark;
    uint32_t row;
    uint32_t error;
    uint32_t namespace_row;
    uint16_t flags;               /* BORN: the key follows. FORGOTTEN: ends with its last watcher */
    uint8_t  key_len;
    uint8_t  key_type;
    uint32_t uid;                 /* in whose account it is; PG_NIL = nobody's */
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
    uint64_t position;            /* of its notice, + 1; 0 = it had none */
    uint64_t sequence;            /* of its notice */
    uint64_t previous;            /* of its notice, as in pg_wal_fire */
    uint32_t slot;
    uint32_t topic;
    uint32_t error;
    uint16_t keys;
    uint8_t  cause;               /* enum pg_cause */
    uint8_t  flags;               /* enum pg_entry_flag */
    int64_t  ended_boot_ns;       /* real clock */
};

struct pg_wal_session {
    uint64_t session;
    int64_t  at_boot_ns;          /* real clock */
    uint32_t uid;
    uint32_t pid;
    uint64_t dropped;             /* outcomes and CHECKs that it had not acknowledged */
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

struct pg_wal_done {
    struct pg_wal_row row;
    int64_t  at_ns;
};

struct pg_wal_block {
    uint8_t  bulk_load[16];
    uint64_t number;              /* as in pg_bulk_load_block */
    uint64_t bits[64];
};

/* All that struct pg_config needs, and the counters that only rise. */
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
    int64_t  now_ns;              /* on the arena's clock */
    int64_t  wall_offset_ns;      /* wall = the arena's clock + offset */
    int64_t  created_wall_ns;
    int64_t  wall_origin_ns;
    uint64_t next_ticket;
    uint64_t next_incarnation;
    uint64_t replay_tail;
    uint64_t published;
    uint64_t start_lsn;           /* the WAL is to be redone from here */
    uint32_t capacity;
    uint32_t replay_capacity;
    uint32_t fanout;
    uint32_t namespaces;
    uint32_t topics;
    uint32_t watches;
    uint32_t watermarks;
    uint32_t clock_kind;
    uint32_t shard;
    uint32_t shards;
    uint32_t accounts;
    uint32_t bulk_loads;
    uint32_t bulk_load_blocks;
    uint32_t pad;
};

struct pg_wal_entry {
    uint64_t position;
    uint64_t ticket;              /* as in pg_entry */
    int64_t  deadline_ns;
    int64_t  fired_ns;
    uint64_t sequence;
    uint64_t previous;
    uint32_t topic;
    uint32_t payload_len;
    uint8_t  key_len;
    uint8_t  meta;                /* as in pg_entry */
    uint8_t  pad[2];
    uint32_t uid;                 /* of who published it; PG_NIL in snapshots */
    int64_t  ended_boot_ns;       /* real clock: it was published; 0 in snapshots */
};

struct pg_wal_last {
    uint64_t frames;              /* of the snapshot, without this one */
    uint64_t start_lsn;           /* as in pg_wal_head */
    uint64_t end_lsn;             /* the snapshot is valid once the WAL holds this frame */
};

struct pg_wal_opened {
    uint64_t session;
    int64_t  at_boot_ns;          /* real clock */
    uint32_t uid;
    uint32_t pid;                 /* from the kernel; 0 = unknown */
    uint32_t pad;
    uint32_t name_len;            /* 0 = the client gave itself no name */
};

/* Of one session's batches, those that were answered in one loop iteration of the daemon. Some may
 * be missing after a crash. */
struct pg_wal_replied {
    uint64_t session;
    uint64_t sequence;            /* of the first batch */
    int64_t  built_boot_ns;       /* real clock: the first answer was there */
    int64_t  handed_boot_ns;      /* real clock: the socket had the last one */
    uint32_t count;               /* batches */
    uint32_t pad;
};

/* All histograms since the arena's birth: what came between two records is their difference.
 * Missing records make no others wrong. */
struct pg_wal_metrics {
    int64_t  at_boot_ns;          /* real clock */
    uint32_t histogram_count;     /* in the order of enum pg_histogram_id */
    uint32_t bucket_count;        /* of all of them */
};
struct pg_wal_histogram {
    uint64_t sum_ns;              /* as in pg_histogram */
    uint64_t sum_high;
    uint64_t max_ns;
    uint32_t buckets;             /* that are not empty, in rising order */
    uint32_t pad;
};
struct pg_wal_bucket {
    uint64_t count;
    uint32_t bucket;              /* its number, as in pg_histogram */
    uint32_t pad;
};

enum pg_wal_segment_flag { PG_WAL_BEGAN_EMPTY = 1 }; /* the arena held nothing before record 1,
                                                            which is the first of this file */
/* The first bytes of every segment and snapshot file; zeros up to PG_WAL_SEGMENT_HEAD. Every
 * version keeps the magic, the version and the checksum at these offsets, so that a damaged header
 * is not taken for one of another version. */
struct pg_wal_segment {
    uint64_t magic;               /* PG_WAL_SEGMENT_MAGIC or PG_SNAPSHOT_MAGIC */
    uint32_t major;
    uint32_t minor;
    uint8_t  uuid[16];            /* of the arena */
    uint8_t  boot_id[16];
    uint64_t epoch;
    int64_t  boot_ns;             /* the arena's clock and the wall clock, read together */
    int64_t  wall_ns;
    uint64_t first_lsn;           /* of its first frame; of a snapshot: its start LSN */
    uint64_t first_group;         /* number of its first group */
    uint64_t bytes;               /* of the file */
    uint32_t clock_kind;
    uint32_t salt;
    uint32_t flags;               /* enum pg_wal_segment_flag; of a snapshot: 0 */
    uint32_t crc;                 /* CRC32C of all before */
};

/* ---- the private arena file -------------------------------------------------------- */

struct pg_private {
    uint64_t magic;
    uint64_t layout_id;
    uint64_t length;
    uint8_t  uuid[16];            /* the arena it belongs to */
    uint64_t secret[2];           /* of the key hash */
    uint32_t sessions;            /* rows */
    uint32_t window;              /* PG_WINDOW */
    uint32_t session_bytes;       /* of one row */
    uint32_t reply_bytes;         /* of one struct pg_reply_memory */
    uint64_t rows_offset;
    uint64_t replies_offset;      /* sessions x window x struct pg_reply_memory */
    uint64_t next_session;        /* authoritative: serial number of the next session */
    uint64_t version;             /* written last: PG_PRIVATE_MAGIC */
    uint64_t heap_offset;         /* derived: struct pg_blob_heap of the answer pool */
    uint64_t map_offset;          /* derived: which granules of the answer pool are in use */
    uint64_t answers_offset;      /* the answer pool: `answers` x struct pg_result */
    uint32_t answers;             /* results that the replies of all sessions hold at most */
    uint32_t pad;
};

#define PG_BUSY_KEYS 2048         /* bits of a session's set of busy keys */

/* Authoritative. One client session. `last` moves only after every result of that
 * batch is in reply memory. */
struct pg_session {
    uint64_t id;                  /* random << 16 | row; 0 = row not used; written last */
    uint8_t  nonce[16];           /* chosen by the client: a repeated HELLO finds its session */
    uint32_t uid;                 /* from the kernel */
    uint32_t pid;                 /* from the kernel; 0 = unknown */
    uint64_t last;                /* sequence of the last batch applied whole; first is 1 */
    uint64_t current;             /* sequence of the batch being applied; 0 = none */
    uint32_t applied;             /* records of it that are applied */
    uint32_t count;               /* records of it */
    uint64_t intent[4];           /* the record under way: finished or voided by recovery */
    int64_t  opened_boot_ns;      /* real clock */
    int64_t  used_boot_ns;        /* real clock */
    uint32_t inbox_head, inbox_tail; /* derived: slots of outcomes and CHECKs, oldest first */
    uint32_t inbox_next;          /* derived: the first one not sent in this round */
    uint32_t inbox_count;         /* derived */
    int64_t  inbox_boot_ns;       /* real clock: when something was last sent or acknowledged */
    uint64_t bulk_load;           /* of the current batch: row of its bulk load + 1; 0 = none */
    uint64_t charged;             /* records of the current batch that quotas have counted */
    int64_t  begun_boot_ns;       /* real clock: the current batch's application began */
    uint64_t bulk_load_first;     /* row in the bulk load of the batch's first record */
    uint64_t first_id;            /* that it had before its namespaces moved to another arena; 0 =
                                     id */
    int64_t  worked_ns;           /* real clock: the loop worked on the current batch, in calls so
                                     far */
    uint64_t busy_first, busy_last;  /* the set below begins with this batch; the last batch with a
                                     BUSY record: written after the set, 0 = the set is empty */
    uint64_t busy_keys[PG_BUSY_KEYS / 64]; /* hashed keys of the records answered BUSY: the client
                                     has not seen each of these answers */
    uint8_t  worker_len;          /* 0 = the client gave itself no name */
    char     worker[PG_WORKER_MAX]; /* written before `id`, for people alone */
    int64_t  grace_ns;            /* how long it outlives its client */
    uint32_t owned;               /* derived: operations, armed or not acknowledged */
    uint32_t repeats;             /* derived: times that the inbox was sent again since the last
                                     acknowledgement */
    uint32_t away;                /* derived: 1 = nobody is there to send the inbox to */
    uint32_t pad;
};

/* One record's answer; also what the reply carries. */
struct pg_result {
    uint64_t ticket;              /* ticket << 8 | enum pg_status */
    int64_t  deadline_ns;         /* of the timer concerned; 0 when there is none */
};

/* One reply of a session. Its results stand in the answer pool, `count` of them from `answers` on,
 * from the start of the batch until the row serves another batch. */
struct pg_reply_memory {
    uint64_t sequence;            /* of the batch whose results these are; 0 = none */
    uint32_t count;
    uint32_t checksum;            /* of the batch: a re-sent batch must be the same bytes */
    uint32_t extra_blob;          /* keys that CANCEL_FOR_KEY ended; PG_NIL = none */
    uint32_t extra_bytes;
    uint32_t answers;             /* granule of the answer pool; PG_NIL = none, or forgotten */
    uint32_t pad;
};

/* ---- the wire: commands --------------------------------------------------------- */

#define PG_WIRE_MAGIC 0x51434750u        /* "PGCQ" */
#define PG_WIRE_VERSION 1

/* Meanings name the socket, the effect, and the bytes behind the frame of request -> reply. */
enum pg_message {
    PG_M_HELLO = 1,               /* commands: open a session. pg_hello, name -> pg_welcome */
    PG_M_BATCH,                   /* commands: apply records. Names, records, bytes -> pg_result per
                                     record */
    PG_M_QUERY,                   /* commands: look timers up. Names, records, bytes -> pg_info,
                                     bytes per record */
    PG_M_BYE,                     /* commands: end the session and free its outcomes */
    PG_M_PING,                    /* both: answered by the loop, after a reload that SIGHUP asked for
                                     before */
    PG_M_OUTCOMES,                /* commands: pushed by the daemon. pg_outcome, bytes */
    PG_M_ACK,                     /* commands: acknowledge outcomes, answer a CHECK. pg_ack of each; a
                                     reply only if refused */
    PG_M_BULK_LOAD,               /* both: ask about a bulk load, or change it. pg_bulk_load_ask,
                                     name -> pg_bulk_load_info, pg_bulk_load_part of each part */
    PG_M_PLACE,                   /* both, of a deployment of shards: give a namespace its shards.
                                     Name */
    PG_M_ADVANCE = 32,            /* admin: move a virtual clock to at_ns. -> pg_tail, names per
                                     topic of users */
    PG_M_STOP,                    /* admin: end the daemon cleanly; answered before */
    PG_M_PUBLISH,                 /* admin: write a notice without a timer. pg_publish, names, key,
                                     payload -> pg_result */
    PG_M_NAMESPACE,               /* admin: create or set a namespace. pg_namespace_set, name ->
                                     pg_namespace_set */
    PG_M_SESSIONS,                /* admin: list sessions, without rights those of the sender's uid.
                                     -> pg_session_info of each */
    PG_M_DROP                     /* admin: end the frame's session, without rights only one of the
                                     sender's uid */
};

/* Every request and reply begins with these 64 bytes. A reply repeats `message`,
 * `session`, `sequence`. Unused fields are 0. */
struct pg_frame {
    uint32_t magic;               /* PG_WIRE_MAGIC */
    uint16_t version;             /* PG_WIRE_VERSION */
    uint16_t message;             /* enum pg_message */
    uint64_t session;             /* HELLO: 0 */
    uint64_t sequence;            /* BATCH: 1, 2, ... per session; else echoed */
    uint32_t count;               /* BATCH, QUERY: records */
    uint16_t names;               /* BATCH, QUERY: entries of the name table */
    uint16_t error;               /* replies: enum pg_error; 0 = none */
    uint32_t names_bytes;         /* bytes of the name table, padded to 8 */
    uint32_t flags;               /* enum pg_frame_flag */
    int64_t  at_ns;               /* BATCH under the virtual clock, ADVANCE: go there first */
    uint64_t detail[2];           /* replies with an error: its figures; BATCH: [0] = when it was
                                     packed, CLOCK_BOOTTIME of the daemon's host in ns; 0 =
                                     unknown; [1] = from the oldest batch that had no answer when
                                     this one was numbered to this one; 0 = all had theirs */
};
enum pg_frame_flag {
    PG_W_AT = 1,                  /* at_ns is meant */
    PG_W_DURABLE = 2,             /* BATCH: answer after the WAL's commit */
    PG_W_DRAIN = 4,               /* STOP: when nothing is armed any more; arm nothing until then */
    PG_W_RESUME = 8,              /* STOP: not any more; arm again */
    PG_W_BULK_LOAD = 16           /* BATCH: a struct pg_rows stands before the name table */
};

/* The rows of a bulk load that a batch's records are: the n-th has number first_row + n. */
struct pg_rows {                  /* 32 bytes */
    uint8_t  bulk_load[16];       /* chosen by who loads; not 0 */
    uint64_t first_row;           /* number of the first record */
    uint64_t fencing_token;       /* number of this run of the bulk load; a higher one shuts out
                                     lower ones */
};

/* BATCH and QUERY: frame, struct pg_rows of a batch with PG_W_BULK_LOAD, name table, records, byte
 * area. Name table: per entry u8 namespace length, u8 topic length, the bytes of both.
 * Byte area: per record, in order: key, payload, extension (no padding). Nothing may follow.
 * A WATCH's extension is, per watch key, struct pg_watch_key and the key's bytes. */
enum pg_op {
    PG_OP_PUT = 1,                /* arms a timer */
    PG_OP_CANCEL,                 /* ends a timer or an operation */
    PG_OP_GET,                    /* QUERY: asks for a timer or an operation */
    PG_OP_WATCH,                  /* arms an operation */
    PG_OP_ADVANCE_KEY,            /* raises a watermark to a value; a lower one changes nothing */
    PG_OP_BUMP,                   /* adds to a watermark */
    PG_OP_FAIL,                   /* fails a watch key */
    PG_OP_CLEAR,                  /* ends its failure */
    PG_OP_FORGET,                 /* removes a watch key, with the last operation that
                                     watches it */
    PG_OP_CANCEL_FOR_KEY,         /* cancels all operations that watch it */
    PG_OP_COMPLETE,               /* the owner answers a CHECK with true */
    PG_OP_UNPARK                  /* arms a parked timer, with its payload */
};
enum pg_put_mode {
    PG_MODE_ERROR,                /* refused with EXISTS if the key is armed */
    PG_MODE_REPLACE,              /* takes the place of what is armed */
    PG_MODE_KEEP,                 /* changes nothing if the key is armed */
    PG_MODE_EXTEND,               /* moves the deadline, to a later one only */
    PG_MODES
};
enum pg_time_kind {
    PG_T_BOOT,                    /* a deadline on the arena's clock */
    PG_T_DELAY,                   /* a delay from when the record is applied */
    PG_T_WALL,                    /* a deadline on the wall clock */
    PG_T_KINDS
};

struct pg_record {                /* 32 bytes */
    uint8_t  op;                  /* enum pg_op */
    uint8_t  mode;                /* PUT: enum pg_put_mode; WATCH: enum pg_condition */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  key_len;             /* 1..255 */
    uint16_t name;                /* index into the name table */
    uint8_t  time_kind;           /* PUT: enum pg_time_kind of time_ns */
    uint8_t  flags;               /* WATCH: 1 = a notice to the topic, too */
    uint32_t payload_len;         /* PUT, WATCH, UNPARK: 0..65536 */
    uint32_t ext_len;             /* WATCH: bytes of its watch keys; PUT, for tag and slack: bytes
                                     of its struct pg_ext; 0 */
    int64_t  time_ns;             /* PUT: deadline or delay */
    uint64_t value;               /* CANCEL: only this ticket, 0 = any; PUT with mode EXTEND: the
                                     same, needed to extend an operation; UNPARK: this ticket; WATCH:
                                     SUM's threshold, QUORUM's number of keys; ADVANCE_KEY:
                                     watermark; BUMP: n; FAIL: code; COMPLETE: version */
};

enum pg_watch_key_flag { PG_WK_OWN = 1 };   /* forgotten when the operation ends */

struct pg_watch_key {             /* 24 bytes, then key_len bytes */
    uint64_t target;              /* ALL, ANY, QUORUM: target, at most PG_TARGET_MAX; SUM: base,
                                     2^64 - 1 = the watermark at arming */
    uint64_t cap;                 /* SUM: most that this key may add; else 0 */
    uint8_t  key_len;             /* bytes of the key */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  flags;               /* enum pg_watch_key_flag */
    uint8_t  pad[5];
};

/* Statuses of a record. Stable numbers. Each that refuses has its counter in metrics.c. */
enum pg_status {
    PG_ST_NONE = 0,               /* no answer */
    PG_ST_ADDED = 1,              /* PUT: armed */
    PG_ST_REPLACED = 2,           /* PUT replace: the old timer is gone */
    PG_ST_KEPT = 3,               /* PUT keep, or extend to an earlier time: unchanged */
    PG_ST_EXTENDED = 4,           /* PUT extend: same ticket, later deadline */
    PG_ST_EXISTS = 5,             /* PUT error: refused, the key is armed; PUT replace, extend: by an
                                     operation */
    PG_ST_CANCELLED = 6,          /* CANCEL: it will not fire */
    PG_ST_FIRED = 7,              /* CANCEL: too late, its notice is in the replay buffer */
    PG_ST_UNKNOWN = 8,            /* CANCEL, GET, PUT with a ticket: no such timer */
    PG_ST_FOUND = 9,              /* GET */
    PG_ST_DONE = 10,              /* ADVANCE .. FORGET, COMPLETE: deadline_ns = operations ended;
                                     PUBLISH: when */
    PG_ST_MORE = 11,              /* CANCEL_FOR_KEY: so many were ended, there are others */
    PG_ST_BULK_LOADED = 12,       /* PUT: this row of the bulk load was done before; with the timer
                                     that its key has now, if any */
    PG_ST_PARKED = 13,            /* PUT: accepted, and parked; GET: it is parked */
    PG_ST_UNPARKED = 14,          /* UNPARK: armed, with the ticket and the deadline that it had */
    PG_ST_FULL = 16,              /* no free slot */
    PG_ST_FULL_PAYLOAD = 17,      /* no space for key and payload */
    PG_ST_FULL_NAMESPACES = 18,   /* no free row for the namespace */
    PG_ST_FULL_TOPICS = 19,       /* no free row for the topic */
    PG_ST_FULL_TICKETS = 20,      /* all tickets of the shard were given */
    PG_ST_FULL_KEYS = 21,         /* watch keys */
    PG_ST_FULL_WATCHES = 22,      /* watch records */
    PG_ST_FULL_ACCOUNTS = 23,     /* uids with an account, which a uid needs for what a quota or its
                                     share of a table counts */
    PG_ST_TOO_FAR = 24,           /* the deadline is past 2^63 - 1 */
    PG_ST_DENIED = 25,            /* the namespace has another owner, or the name is reserved */
    PG_ST_BUSY = 26,              /* WATCH: deadline_ns = how many operations the session may own, if
                                     it owns as many, armed or not acknowledged */
    PG_ST_QUOTA = 27,             /* ticket = quota << 8 | enum pg_quota; deadline_ns = what is
                                     used, of OPS when, on the real clock, the next one is
                                     allowed; from UID_TOPICS on: uid << 32 | rows that it holds */
    PG_ST_WRONG_SHARD = 28,       /* PUBLISH: the namespace is in another shard */
    PG_ST_DUPLICATE = 29,         /* WATCH: a key twice */
    PG_ST_OVERFLOW = 30,          /* a watermark past 2^63 - 1 */
    PG_ST_WAL = 31,               /* the WAL has stopped: nothing is armed any more */
    PG_ST_STOPPING = 32,          /* PUT, WATCH: the daemon waits for what is armed, and then
                                     stops */
    PG_ST_FULL_BULK_LOADS = 33,   /* no free slots for the bulk load or its rows */
    PG_ST_FENCED = 34,            /* a newer run of the bulk load has begun */
    PG_ST_CLOSED = 35,            /* the bulk load is closed, and this row was not done */
    PG_ST_ARENA = 36              /* PUT, WATCH, UNPARK: the arena files have lost their names, and
                                     a copy has no space: what is armed goes with the daemon */
};

/* Which quota was used up; from UID_TOPICS on, a uid's share of a table. */
enum pg_quota {
    PG_Q_NAMESPACE_TIMERS = 1,    /* armed timers of the namespace */
    PG_Q_NAMESPACE_BYTES,         /* bytes of their keys and payloads */
    PG_Q_NAMESPACE_OPS,           /* adds, watches and advances per second */
    PG_Q_UID_TIMERS,              /* armed timers of the uid */
    PG_Q_UID_BYTES,               /* bytes of their keys and payloads */
    PG_Q_UID_OPS,                 /* the same of the uid */
    PG_Q_UID_TOPICS,              /* topics that it created */
    PG_Q_UID_NAMESPACES,          /* namespaces that it created */
    PG_Q_UID_SESSIONS,            /* its sessions */
    PG_Q_UID_WATCH_KEYS,          /* watch keys that it created */
    PG_Q_UID_WATCHES,             /* watch records of its operations */
    PG_Q_UID_OPERATIONS,          /* operations that its sessions own */
    PG_Q_UID_BULK_LOADS,          /* bulk loads that it began */
    PG_Q_UID_BULK_LOAD_BLOCKS     /* blocks of rows of its bulk loads */
};

/* Errors of a whole message: nothing of it was applied. Stable numbers. */
enum pg_error {
    PG_ERR_NONE = 0,              /* the records have their own statuses */
    PG_ERR_MALFORMED = 1,         /* detail: byte offset or record index, what was found */
    PG_ERR_VERSION = 2,           /* detail: ours, theirs */
    PG_ERR_UNKNOWN_MESSAGE = 3,   /* detail: message */
    PG_ERR_TOO_LARGE = 4,         /* detail: limit, found */
    PG_ERR_SESSION_EXPIRED = 5,   /* the daemon does not know the session */
    PG_ERR_OUT_OF_ORDER = 6,      /* detail: expected, found */
    PG_ERR_STALE = 7,             /* detail: oldest remembered, found */
    PG_ERR_CHANGED = 8,           /* a re-sent batch differs from the first */
    PG_ERR_SESSIONS_FULL = 9,     /* detail: rows, longest silence in ns */
    PG_ERR_DENIED = 10,           /* detail: uid */
    PG_ERR_STOPPING = 11,         /* the daemon is about to end: send it again */
    PG_ERR_CLOCK = 12,            /* ADVANCE or at_ns without a virtual clock, or backwards */
    PG_ERR_INTERNAL = 13,         /* a fault of the daemon: its log has more */
    PG_ERR_NO_WAL = 14,           /* durability is asked for, and there is no WAL */
    PG_ERR_NAMESPACES_FULL = 15,  /* NAMESPACE, BULK_LOAD. detail: rows */
    PG_ERR_NOT_DURABLE = 16,      /* applied, but the WAL stopped before it was on disk; detail: the
                                     newest LSN on disk, errno */
    PG_ERR_BUSY = 17,             /* NAMESPACE, BULK_LOAD: the WAL cannot take it now. detail: why,
                                     BUSY or WAL of enum pg_status. BATCH: the answer pool is full
                                     of recent answers. detail: its results */
    PG_ERR_BULK_LOADS_FULL = 18,  /* BULK_LOAD. detail: bulk loads that are remembered at most */
    PG_ERR_FENCED = 19,           /* BULK_LOAD: a newer run of it has begun. detail: its fencing
                                     token, yours */
    PG_ERR_WRONG_SHARD = 20,      /* the namespace is in another shard, or in none yet. detail:
                                     shard, shards; of a deployment: version, shards */
    PG_ERR_PLACED = 21,           /* PLACE: it was born otherwise. detail: its partitions, yours */
    PG_ERR_QUOTA = 22             /* HELLO, NAMESPACE, BULK_LOAD, PLACE: the uid holds its share of a
                                     table. detail: as ticket and deadline_ns of PG_ST_QUOTA */
};

/* HELLO request: frame, struct pg_hello, name. Reply: frame, struct pg_welcome. */
struct pg_hello {
    uint8_t  nonce[16];           /* chosen at random: the same one finds the same session */
    uint32_t name_len;            /* 0..63: what the WAL calls who opens the session */
    uint32_t pad;
    int64_t  grace_ns;            /* how long the session outlives its client, to be found again by
                                     the nonce; 0 to PG_GRACE_MAX_NS */
};
struct pg_welcome {
    uint64_t session;             /* its id, for all later frames */
    uint64_t stream_id;           /* of the notices of this arena */
    uint8_t  uuid[16];            /* of the arena */
    uint64_t layout_id;           /* of the arena: readers map no other one */
    uint64_t epoch;               /* +1 at every start of the daemon */
    int64_t  now_ns;              /* the arena's clock */
    int64_t  wall_offset_ns;      /* wall = now + offset */
    uint64_t last;                /* newest batch applied for this session */
    uint64_t tick_ns;             /* length of a tick of the wheel */
    uint32_t clock_kind;          /* enum pg_clock_kind */
    uint32_t window;              /* batches that may be without an answer */
    uint32_t batch_records;       /* records of a batch, at most */
    uint32_t message_bytes;       /* bytes of a message, at most */
    int64_t  real_boot_ns;        /* the daemon's CLOCK_BOOTTIME, also under the virtual clock */
    uint32_t node;                /* NUMA node of the arena + 1, else of the threads; 0 = any */
    uint32_t reaper_cpu;          /* CPU of the loop + 1; 0 = any */
    uint64_t first_id;            /* the id that this session had at first: another than before
                                     means another session, though the nonce is the same */
    uint32_t wal;                 /* 1: the daemon keeps one, and PG_W_DURABLE is granted */
    uint32_t pad;
    uint64_t term;                /* for replication: of the leader that answers; alone: 0 */
};

/* NAMESPACE request: frame, this, the name's bytes. It sets what `fields` names, and nothing
 * else; a namespace that is not there is born. Reply: frame, this with all as it is now. */
enum pg_namespace_field {
    PG_N_OWNER = 1,               /* owner_uid */
    PG_N_DURABILITY = 2,          /* durability */
    PG_N_TIMERS = 4,              /* quota_timers */
    PG_N_BYTES = 8,               /* quota_bytes */
    PG_N_OPS = 16,                /* quota_ops */
    PG_N_PARK = 32,               /* park_beyond_ns */
    PG_N_FIELDS = 64
};
struct pg_namespace_set {
    uint32_t fields;              /* enum pg_namespace_field, added up */
    uint32_t owner_uid;           /* 2^32 - 1 = anybody */
    uint32_t durability;          /* 0 memory, 1 durable */
    uint32_t name_len;            /* 1..63 */
    uint64_t quota_timers;        /* 0 = none, here and below */
    uint64_t quota_bytes;         /* of keys and payloads */
    uint64_t quota_ops;           /* per second */
    uint64_t park_beyond_ns;      /* needs a WAL */
};

/* PLACE request: frame (count = partitions, 1 on the command socket), the namespace's name. Reply:
 * frame (count = its partitions), once the routing table says where it is. */

/* BULK_LOAD request: frame, this, the namespace's name. Reply: frame, struct pg_bulk_load_info,
 * then `count` of struct pg_bulk_load_part. OPEN, CLOSE and FORGET may be repeated at will. */
enum pg_bulk_load_action {
    PG_LA_STATUS,                 /* how it stands, with its rows from block `from` on */
    PG_LA_OPEN,                   /* begins it, or this run of it */
    PG_LA_CLOSE,                  /* begins it if need be; it takes no more rows */
    PG_LA_FORGET,                 /* as if it had never been */
    PG_BULK_LOAD_ACTIONS
};
struct pg_bulk_load_ask {         /* 40 bytes */
    uint8_t  bulk_load[16];       /* not 0 */
    uint64_t fencing_token;       /* OPEN, CLOSE: as in struct pg_rows */
    uint64_t from;                /* STATUS: number of a block */
    uint32_t action;              /* enum pg_bulk_load_action */
    uint32_t name_len;            /* OPEN, CLOSE: 1..63; else 0 */
};
struct pg_bulk_load_info {        /* 56 bytes */
    uint8_t  bulk_load[16];       /* as asked for */
    uint64_t fencing_token;       /* of the newest run */
    uint64_t rows;                /* done */
    uint64_t upto;                /* behind the highest row that is done */
    uint64_t next;                /* block from which on to ask for more; 2^64 - 1 = these are
                                     all */
    uint32_t uid;                 /* who began it */
    uint32_t state;               /* enum pg_bulk_load_state; NONE = no such bulk load */
};
struct pg_bulk_load_part {        /* 520 bytes: rows number * 4096 to number * 4096 + 4095 */
    uint64_t number;              /* of the block */
    uint64_t bits[64];            /* bit n % 64 of bits[n / 64]: the n-th of them is done */
};

/* SESSIONS reply: frame, `count` of these. DROP request: frame, with the session that is to end. */
struct pg_session_info {          /* 56 bytes */
    uint64_t session;             /* its id */
    int64_t  opened_boot_ns;      /* real clock */
    int64_t  used_boot_ns;        /* real clock */
    int64_t  grace_ns;            /* as in struct pg_hello */
    uint32_t uid;                 /* of its client */
    uint32_t pid;                 /* 0 = not on this host, or in another pid namespace */
    uint64_t operations;          /* that it owns, armed or not acknowledged */
    uint64_t unacknowledged;      /* outcomes and CHECKs in its inbox */
};

/* PUBLISH request: frame, this, namespace, topic, key, payload. Reply: frame, struct pg_result with
 * the notice's ticket and time and DONE; or the status that says why there is none. */
struct pg_publish {
    uint32_t payload_len;         /* 0..65536 */
    uint8_t  key_len;             /* 1..255 */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  namespace_len;       /* 1..63 */
    uint8_t  topic_len;           /* 0..127 */
};

/* OUTCOMES: frame, `count` of these, then per record its key, payload, a uint64_t per watch key
 * with its watermark at the end, bitmap of missing keys, bitmap of failed keys. Sent again until an
 * ACK (frame, `count` struct pg_ack) names them. A CHECK is the record with cause 0, without
 * watermarks and bitmaps: acknowledged = the condition is false; true is COMPLETE(version). */
struct pg_outcome {               /* 64 bytes */
    uint64_t ticket;              /* ticket << 8 | enum pg_cause */
    int64_t  deadline_ns;         /* on the arena's clock */
    int64_t  armed_ns;            /* when it was armed, on the same clock */
    int64_t  ended_ns;            /* when it ended */
    uint64_t version;             /* CHECK only */
    uint32_t error;               /* code with which a key failed; 0 = none */
    uint32_t payload_len;         /* bytes of the payload */
    uint16_t keys;                /* watch keys */
    uint16_t bitmap_bytes;        /* of each bitmap; 0 = a CHECK */
    uint8_t  key_len;             /* bytes of the key */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  pad0[2];
    uint32_t slot;                /* to be given back in the ACK */
    uint32_t pad1;
};
struct pg_ack {
    uint64_t ticket;              /* of the operation */
    uint64_t version;             /* of a CHECK; 0 = an outcome */
    uint32_t slot;                /* as in struct pg_outcome */
    uint32_t pad;
};

/* QUERY replies and scans: one per record, followed by namespace, topic, key, payload, and of an
 * operation a struct pg_info_watch for each of its keys, in its order. */
struct pg_info {
    uint64_t ticket;              /* ticket << 8 | enum pg_status (FOUND, UNKNOWN, DENIED) */
    int64_t  deadline_ns;         /* on the arena's clock */
    int64_t  wall_ns;             /* absolute wall deadline; INT64_MIN = none */
    uint32_t payload_len;         /* bytes of the payload */
    uint8_t  key_len;             /* bytes of the key */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  namespace_len;       /* bytes of the namespace */
    uint8_t  topic_len;           /* bytes of the topic */
    uint64_t owner;               /* of an operation: its owner's session; else 0 */
    uint64_t threshold;           /* of an operation, as in struct pg_operation */
    uint32_t watch_bytes;         /* of an operation: what stands behind its payload */
    uint16_t keys;                /* of an operation: its watch keys; 0 = a timer */
    uint8_t  condition;           /* of an operation: enum pg_condition */
    uint8_t  pad0;
    uint32_t owner_uid;           /* of an operation: its owner's; PG_NIL = unknown */
    uint8_t  pad1[4];
};
struct pg_info_watch {            /* followed by the key */
    uint64_t target;              /* UINT64_MAX = reached; SUM: the base; CLIENT: 0 */
    uint64_t cap;                 /* SUM */
    uint64_t watermark;           /* of the key now */
    uint32_t error;               /* code of its failure; 0 = it has not failed */
    uint8_t  key_len;             /* bytes of the key */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  own;                 /* 1 = forgotten when the operation ends */
    uint8_t  pad;
};

/* ADVANCE reply: frame (count = topics), then one of these per topic with its names
 * (namespace, topic) behind it. */
struct pg_tail {
    uint64_t sequence;            /* of the topic's newest notice */
    uint64_t incarnation;         /* of the topic */
    uint8_t  namespace_len;       /* bytes of the namespace */
    uint8_t  topic_len;           /* bytes of the topic */
    uint8_t  pad[6];
};

/* ---- the wire: notices ---------------------------------------------------------- */

#define PG_NOTICE_MAGIC 0x4e434750u      /* "PGCN" */

/* Second frame of a notice message: this head, `count` records, then per record its key
 * and payload. Zero records = a tail heartbeat. The n-th record has sequence first + n. */
struct pg_notices {
    uint32_t magic;               /* PG_NOTICE_MAGIC */
    uint16_t version;             /* PG_WIRE_VERSION */
    uint16_t pad0;
    uint64_t stream_id;           /* of the arena */
    uint64_t incarnation;         /* of the topic */
    uint64_t first;               /* sequence of the first record */
    uint64_t tail;                /* newest sequence of the topic when this was built */
    int64_t  built_ns;            /* on the arena's clock */
    int64_t  wall_offset_ns;      /* wall = arena clock + offset */
    uint32_t count;               /* records */
    uint32_t pad1;
};

struct pg_notice {                /* 32 bytes */
    uint64_t ticket;              /* of the timer or the operation */
    int64_t  deadline_ns;         /* on the arena's clock */
    int64_t  fired_ns;            /* when it was taken from the wheel, on the same clock */
    uint32_t payload_len;         /* bytes of the payload */
    uint8_t  key_len;             /* bytes of the key */
    uint8_t  key_type;            /* enum pg_key_type */
    uint8_t  cause;               /* enum pg_cause */
    uint8_t  flags;               /* enum pg_entry_flag */
};
