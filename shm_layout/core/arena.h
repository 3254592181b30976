/* arena.h - the handle of a mapped arena, access to its rows, and the state of the running call. */
#ifndef PURGATORYD_ARENA_H
#define PURGATORYD_ARENA_H

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/histograms.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/wheel.h"

/* Number of replay buffer entries that one pg_notices call examines. */
#define PG_NOTICE_WINDOW 1024

/* The replay buffer entries of one topic within a window, chained oldest first. */
struct pg_group {
    uint32_t topic, count;
    uint16_t first, last;         /* offsets from the window's start */
    uint64_t bytes;
};

/* Number of slots that one iteration remembers for prefetching; a batch adds at most 1024. */
#define PG_NEWS 16384

/* Results that the passes of a rebuild leave for its last step. PG_NIL = none. */
struct rebuild {
    uint64_t fired;               /* control word of the slot whose notice is committed; 0 = none */
    uint32_t fired_slot;
    uint32_t newest;              /* slot with the newest ticket */
    uint32_t outcome;             /* first slot in state OUTCOME */
    /* First operation whose condition the rebuild has to evaluate again. */
    uint32_t unsettled;
    uint32_t unsettled_key;       /* slot that began to keep its key unique; PG_NIL = none */
};

/* The running call: its sender, its batch, the current record, and what the call leaves for the
 * functions of api.h that the daemon calls next. */
struct call_state {
    /* Time of the message on the arena's clock. It may be later than the time of the last
     * advance. */
    int64_t moment_ns;
    int64_t real_boot_ns;         /* time of the message on the real boot clock */
    uint32_t real_s;              /* real_boot_ns in whole seconds */
    /* Number of watch visits that this call may still make. */
    uint32_t visits_left;
    uint32_t uid;                 /* uid of the sender; PG_NIL = no message is being handled */
    uint16_t account;             /* account row of the sender; 0 = none */
    /* Maximum number of rows that the sender may hold in each table; UINT32_MAX = no limit. */
    uint32_t watch_key_share, watch_share;
    uint32_t operation_share, block_share;
    /* Number of bulk load blocks that the sender holds; counted only if block_share limits it. */
    uint32_t blocks_held;

    /* The running batch. */
    uint64_t sequence;            /* sequence of the batch; 0 = no batch is running */
    bool durable;                 /* the reply waits until the batch is committed */
    bool reserved;                /* the batch uses a name that only PUBLISH may use */
    bool in_bulk_load;            /* the current record is a row of a bulk load */
    uint64_t bulk_load_row;
    uint32_t bulk_load;           /* bulk load of the batch; PG_NIL = none */
    unsigned bulk_load_status;    /* PG_ST_NONE, or the status that refuses all bulk load rows */
    struct pg_timestamps batch_timestamps; /* the timestamps that all records of the batch share */
    uint8_t items[PG_ITEMS_MAX];  /* items of the current PUT with the time until which its key is
                                     unique */
    uint8_t name_uses[PG_BATCH_NAMES];      /* NEEDS_ bits of the records that use each name */
    uint8_t name_access[PG_BATCH_NAMES];    /* access_of() result for the sender, per name */
    uint32_t name_namespaces[PG_BATCH_NAMES];
    uint32_t name_rows[PG_BATCH_NAMES];     /* topic row of each name that needs one */
    /* Per name: the result that its records get because the name's row could not be created.
     * Ticket 0 = the row exists or is not needed. */
    struct pg_result name_refusals[PG_BATCH_NAMES];
    uint32_t hashes[PG_BATCH_RECORDS];
    uint32_t key_hashes[PG_WATCH_KEYS_MAX]; /* watch keys of the current operation */
    uint32_t rows[PG_WATCH_KEYS_MAX];       /* watermark rows of the watch being armed */
    uint16_t seen[4 * PG_WATCH_KEYS_MAX];   /* hash set over rows[] */

    /* Results of the last call. */
    uint64_t durable_lsn;         /* LSN that the reply waits for; 0 = none */
    struct pg_session *worked;    /* session whose batch was applied; NULL = none */
    int64_t begun_boot_ns;        /* when the answered batch began; 0 = no batch was answered */
    /* Slots of the last OUTCOMES message, linked by inbox_next. */
    uint32_t notified_first;
    uint32_t notified_count;
    /* Member of the last JOBS message, and the first of the jobs that it contained. PG_NIL: the
     * message reported the end of a group to the session `sent_session`; 0 = there was none. */
    uint32_t sent_member, sent_job;
    uint64_t sent_session;
    /* Slots that a batch armed. When the call has returned, the daemon stores that time in the
     * timestamps of these slots. */
    uint32_t armed_count;
    uint32_t armed[PG_BATCH_RECORDS];

    /* Scratch memory of pg_notices. */
    struct pg_group groups[PG_NOTICE_WINDOW];
    uint16_t group_next[PG_NOTICE_WINDOW];
};

/* A compaction pass (compaction.c). */
struct compaction {
    uint32_t phase, next_row;
    uint32_t limit;               /* granule at which the zone may end */
    uint32_t zone;                /* number of the zone that is considered next */
    uint32_t failures;            /* passes since a pass last made a large enough block */
    uint32_t used_at_failure;     /* used granules after the last pass */
};

/* A group that is being created. It exists once it has a job of each notice that it begins with. A
 * rebuild frees its row and its jobs. */
struct group_draft {
    uint64_t position;            /* next notice of the replay buffer */
    uint32_t group;               /* row; PG_NIL = there is no draft */
    uint32_t name_len;
    bool full;                    /* a notice did not fit into the budget */
    bool waits;                   /* until the WAL has committed frames */
};

enum { CALENDAR_IDLE, CALENDAR_ASKED, CALENDAR_ANSWERED };
/* The question of a message about nominal times, and the answer of the daemon. */
struct calendar {
    uint32_t state;
    uint32_t status;              /* enum pg_status of the answer; DONE = the spec is valid */
    uint32_t count;               /* number of times in the answer */
    struct pg_question question;  /* its texts are in `texts` */
    uint8_t texts[PG_SPEC_MAX + PG_ZONE_MAX];
    int64_t times[PG_NOMINAL_MAX];
};

/* State that this process keeps between calls. No other process sees it. */
struct arena_state {
    bool draining;                /* the daemon is stopping, so no timer may be armed */
    bool nameless;                /* the arena file has no name, so no timer may be armed */
    bool confined;                /* only a NAMESPACE record may create a namespace */
    bool restricted;              /* a namespace has an owner or a quota, or uids have quotas */
    bool inbox_news;              /* some session has unsent outcomes */
    bool holding;                 /* operations that came due in an outage wait for their release */
    /* Start of the outage on the arena's clock. Operations with earlier deadlines were handled
     * before the outage. */
    int64_t hold_after_ns;
    int64_t hold_upto_ns;         /* end of the outage on the arena's clock */
    int64_t now_ns;               /* time of the last advance, on the arena's clock */
    int64_t started_ns;           /* arena clock at the last rebuild */
    uint64_t woken;               /* sleepers were woken for all entries below this position */
    uint64_t first_number;        /* first ticket number after the last rebuild */
    uint64_t wal_buffer_end;      /* position after the frame being written */
    int64_t outage_end_ns;        /* timers due until this time fire at the rate of a catch-up */
    int64_t catch_up_ns;          /* time at which timers of the backlogs may end; INT64_MAX = no
                                     backlog has timers that may */
    uint32_t backlog_cursor;      /* topic whose backlog is looked at next */
    struct group_draft draft;
    int64_t wall_placed_by_ns;    /* wall offset that the last placement of wall timers used */
    /* Next slot to place after a step of the wall clock; PG_NIL = no step is being applied. */
    uint32_t wall_cursor;
    uint32_t session_rows;        /* number of the first session row after the last used row */
    uint32_t free_member;         /* first unused row of members; PG_NIL = none */
    uint32_t evicted_session;     /* evicted sessions in earlier rows are away; PG_NIL = all are */
    bool jobs_wait;               /* a job may be leased: one waits, or a member has a free credit */
    bool jobs_unsent;             /* a JOBS message may have to be sent */
    int64_t jobs_again_ns;        /* time on the arena's clock at which a rate allows another lease */
    bool sweeping;                /* a sweep is running */
    bool sweep_waits;             /* the sweep waits until the WAL has committed frames */
    uint32_t free_bulk_load_block; /* first block of the free chain; PG_NIL = none */
    uint32_t bulk_load_block;     /* block of the last row lookup, or PG_NIL */
    /* Slots of outcomes and CHECKs whose session has ended, linked by inbox_next. */
    uint32_t orphans;
    /* Value of ends_so_far() at the last failed search for a reusable topic row. As long as
     * ends_so_far() returns this value, no timer, operation or notice has ended since then, and no
     * topic row is reusable. */
    uint64_t topics_stuck_at;
    /* Value of ends_so_far() when the uid below was refused another topic. As long as ends_so_far()
     * returns this value, the uid gets no further topic. */
    uint64_t topics_refused_at;
    uint32_t topics_refused_uid, topics_refused_held;
    struct rebuild rebuild;
    struct compaction compaction;
    uint64_t backlogs[1024];      /* bit t: topic t may have a backlog */
    /* Lists of the schedules whose occurrence has to be armed, and of those whose times have to be
     * computed; PG_NIL = empty. */
    uint32_t schedules_due, schedules_due_last;
    uint32_t schedules_asked, schedules_asked_last;
    bool schedules_stuck;         /* an occurrence that has to be armed waits for space */
    uint32_t stale_occurrence;    /* for a rebuild: occurrence that no schedule has; PG_NIL = none */
    struct calendar calendar;
    uint32_t news_count, news_seen;
    uint32_t news[PG_NEWS];       /* slots that most recently entered an inbox, for prefetching */
};

/* The mapping, the state between calls, and the running call. */
struct pg_arena {
    /* The mapping: where its regions begin, and how many rows they have. */
    struct pg_header *header;
    struct pg_metrics *metrics;
    struct pg_histogram *histograms;
    struct pg_private *secret;    /* NULL for readers */
    struct pg_session *sessions;
    struct pg_reply_memory *replies;
    /* Results of all replies, in the private arena file. */
    struct blob_pool answers;
    /* capacity + 1 slots: with the extra slot a PUT can replace a timer in a full arena. */
    struct slots slots;
    struct wheel wheel;
    struct key_index index;
    struct blob_pool blobs;
    struct pg_namespace *namespaces;
    struct pg_topic *topics;
    uint32_t *name_index;         /* row number + 1; topics follow namespaces */
    struct pg_account *accounts;
    struct pg_entry *replay_buffer;
    struct pg_purgatory *purgatory;
    struct pg_watch *watches;
    struct pg_watermark *watermarks;
    struct key_index watermark_index;
    struct pg_bulk_load *bulk_loads;
    struct pg_bulk_load_block *bulk_load_blocks;
    uint64_t *bulk_load_bits;
    struct pg_sweep *sweeps;      /* PG_SWEEPS rows */
    struct key_index bulk_load_index;
    struct pg_consumer_group *groups;
    struct pg_group_topic *group_topics;
    struct pg_member *members;
    struct pg_job *jobs;
    struct pg_group_change *group_change;
    /* The rows of jobs: their free stack, and their part of the table of the wheel. */
    struct slots job_slots;
    struct key_index job_index;   /* by key */
    struct key_index order_index; /* first job of each order key */
    struct pg_schedule *schedules;
    struct pg_cursor *cursors;
    struct pg_wal_buffer *wal_buffer; /* NULL = no WAL */
    uint8_t *ring;
    struct pg_timestamps *timestamps; /* one per slot; NULL = no WAL */
    uint32_t namespace_rows, topic_rows, name_cells, account_rows, watch_rows, watermark_rows;
    uint32_t bulk_load_rows, bulk_load_block_rows, schedule_rows, cursor_rows;
    uint32_t group_rows, group_topic_rows, member_rows;

    struct arena_state state;
    struct call_state call;
};

/* Define the accessor of a table's rows. The caller has checked that the row exists. */
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
ROW(watermark_at, pg_watermark, watermarks, watermark_rows, "watermarks")
ROW(bulk_load_at, pg_bulk_load, bulk_loads, bulk_load_rows, "bulk loads")
ROW(bulk_load_block_at, pg_bulk_load_block, bulk_load_blocks, bulk_load_block_rows, "bulk loads")
ROW(group_at, pg_consumer_group, groups, group_rows, "groups")
ROW(group_topic_at, pg_group_topic, group_topics, group_topic_rows, "groups")
ROW(member_at, pg_member, members, member_rows, "members")
ROW(job_at, pg_job, jobs, job_slots.capacity, "jobs")
ROW(job_hot, pg_hot, job_slots.hot, job_slots.capacity, "jobs")
ROW(schedule_at, pg_schedule, schedules, schedule_rows, "schedules")
ROW(cursor_at, pg_cursor, cursors, cursor_rows, "cursors")
ROW(session_at, pg_session, sessions, secret->sessions, "sessions")
#undef ROW

/* Key of a timer or operation. It follows the extension at the blob's start. */
static inline const uint8_t *slot_key(const struct pg_arena *a, uint32_t slot)
{
    const struct pg_cold *c = slot_cold(a, slot);
    return blob_at(&a->blobs, c->blob) + c->ext_len;
}

/* Set the clocks of the running call. With the boot clock, a message that arrived after the last
 * advance gets its own arrival time. */
static inline void time_set(struct pg_arena *a, int64_t now_ns, int64_t real_boot_ns)
{
    const bool later = a->header->clock_kind == PG_CLOCK_BOOT && real_boot_ns > now_ns;
    a->state.now_ns = now_ns;
    a->call.moment_ns = later ? real_boot_ns : now_ns;
    a->call.real_boot_ns = real_boot_ns;
    a->call.real_s = (uint32_t)(real_boot_ns / 1000000000);
}

/* Count a duration in its histogram. PG_UNMEASURED builds count nothing, so that a benchmark can
 * measure the cost of counting. */
static inline void measure(struct pg_arena *a, enum pg_histogram_id id, int64_t ns, uint64_t times)
{
#ifndef PG_UNMEASURED
    PG_ASSERT_IN_TESTS((unsigned)id < PG_HISTOGRAMS, "histograms", "an id names a histogram");
    histogram_add(&a->histograms[id], ns, times);
#else
    (void)a, (void)id, (void)ns, (void)times;
#endif
}

#endif
