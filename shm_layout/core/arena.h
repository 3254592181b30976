/* arena.h - the handle of an arena, its rows, and the running call. */
#ifndef PURGATORYD_ARENA_H
#define PURGATORYD_ARENA_H

#include "core/base/blobs.h"
#include "core/base/check.h"
#include "core/base/common.h"
#include "core/base/histograms.h"
#include "core/base/index.h"
#include "core/base/slots.h"
#include "core/base/wheel.h"

struct put;

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

/* PG_UNMEASURED is for the benchmark that measures what measuring costs. */
static inline void measure(struct pg_arena *a, enum pg_histogram_id id, int64_t ns, uint64_t times)
{
#ifndef PG_UNMEASURED
    histogram_add(&a->histograms[id], ns, times);
#else
    (void)a, (void)id, (void)ns, (void)times;
#endif
}

#endif
