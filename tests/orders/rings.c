/* rings.c - scenarios with the two sides of a ring, which share its words and bytes. No message may
 * be torn or lost, and no side may sleep although the other side has made progress without waking
 * it. */
#include "scenarios.h"

#include "check.h"
#include "core/core.h"

enum { SPACE = 64, SMALL = 8, LARGE = 40, FULL = 4 };

static struct pg_ring *words;
static uint8_t *bytes;
static struct pg_ring_end putter, taker;
static struct pg_ring_end putter_before;
static uint32_t size, put, put_before, taken, message_bytes;
static bool taker_sleeps, putter_sleeps, taker_woken, putter_woken;

static void ring_make(uint32_t ring_size, uint32_t length)
{
    size = ring_size;
    words = aligned_alloc(64, sizeof *words);
    bytes = aligned_alloc(64, SPACE);
    CHECK(words != NULL && bytes != NULL);
    memset(words, 0, sizeof *words);
    memset(bytes, 0, size);
    message_bytes = length;
    put_before = 0;
    pg_ring_open(&putter_before, words, bytes, size);
    model_watch(words, sizeof *words);
    model_watch(bytes, size);
}

static void again(void)
{
    putter = putter_before;
    pg_ring_open(&taker, words, bytes, size);
    put = put_before;
    taken = 0;
    taker_sleeps = putter_sleeps = taker_woken = putter_woken = false;
}

/* Puts one message whose bytes all are its number. Returns whether all of it is in the ring. */
static bool put_one(void)
{
    uint8_t message[LARGE];
    for (uint32_t i = 0; i < message_bytes; i++)
        message[i] = (uint8_t)(put + 1);
    const bool whole = pg_ring_put(&putter, message, message_bytes);
    put += whole;
    taker_woken |= pg_ring_rouse_taker(&putter) != PG_RING_AWAKE;
    return whole;
}

/* Takes one message, or a piece of a large one. Returns whether there was anything. */
static bool take_one(uint8_t message[LARGE])
{
    const uint64_t length = pg_ring_next(&taker);
    if (taker.broken)
        model_fault("a ring that both sides use correctly is broken");
    if (length == 0)
        return false;
    if (length != message_bytes)
        model_fault("a length is torn");
    if (pg_ring_take(&taker, message)) {
        taken++;
        for (uint32_t i = 0; i < message_bytes; i++)
            if (message[i] != (uint8_t)taken)
                model_fault("a message is torn or out of order");
    }
    putter_woken |= pg_ring_rouse_putter(&taker) != PG_RING_AWAKE;
    return true;
}

static void taker_run(void)
{
    uint8_t message[LARGE];
    while (take_one(message)) {}
    taker_sleeps = pg_ring_sleep_taker(&taker, PG_RING_POLL);
}

static void end(void)
{
    if (taker_sleeps && !taker_woken && taken < put)
        model_fault("a message waits and the taker sleeps");
    if (putter_sleeps && !putter_woken && taken == put && taken != 0)
        model_fault("there is space and the putter sleeps");
}

/* ---- a message for a taker that may sleep ----------------------------------------------------- */

static void ring_setup(void) { ring_make(32, SMALL); again(); }
static void ring_putter(void) { put_one(); }

const struct scenario ring_scenario = {
    "ring", ring_setup, again, {ring_putter, taker_run}, false, false, end};

/* ---- a taker that another thread of its process recalls ---------------------------------------- */

static bool recalled_sleeps, recalled_woken;

/* Both threads use the same end of the client, so it is in watched memory. */
static struct pg_ring_end *shared;

static void recall_setup(void)
{
    ring_make(32, SMALL);
    shared = aligned_alloc(64, 2 * 64);
    CHECK(shared != NULL);
    pg_ring_open(shared, words, bytes, size);
    model_watch(&shared->recalled, sizeof shared->recalled);
}

static void recall_again(void)
{
    again();
    recalled_sleeps = recalled_woken = false;
}

static void recaller(void)
{
    recalled_woken = pg_ring_recall(shared) == PG_RING_FUTEX;
}

static void recalled_taker(void) { recalled_sleeps = pg_ring_sleep_unless_recalled(shared); }

static void recall_end(void)
{
    if (recalled_sleeps && !recalled_woken)
        model_fault("the end was recalled and the taker sleeps");
}

const struct scenario ring_recall_scenario = {
    "ring-recall", recall_setup, recall_again, {recaller, recalled_taker}, false, false, recall_end};

/* ---- a full ring: the putter may sleep -------------------------------------------------------- */

static void space_setup(void)
{
    ring_make(16 * FULL, SMALL);
    again();
    while (put < FULL)
        CHECK(put_one());
    putter_before = putter;
    put_before = put;
}

static void space_putter(void)
{
    if (!put_one())
        putter_sleeps = pg_ring_sleep_putter(&putter, PG_RING_POLL);
}

const struct scenario ring_space_scenario = {
    "ring-space", space_setup, again, {space_putter, taker_run}, false, false, end};

/* ---- a putter that waits for half a ring ------------------------------------------------------- */

static void half_putter(void)
{
    putter_sleeps = pg_ring_sleep_putter(&putter, PG_RING_POLL);
}

const struct scenario ring_half_scenario = {
    "ring-half", space_setup, again, {half_putter, taker_run}, false, false, end};

/* ---- a message that is larger than the ring --------------------------------------------------- */

static void large_setup(void) { ring_make(32, LARGE); again(); }

static void large_putter(void)
{
    if (!put_one() && !put_one())
        putter_sleeps = pg_ring_sleep_putter(&putter, PG_RING_POLL);
}

static void large_end(void)
{
    if (taker_sleeps && !taker_woken && taken < put)
        model_fault("a message waits and the taker sleeps");
    if (putter_sleeps && !putter_woken && taker.own == putter.own)
        model_fault("there is space and the putter sleeps");
}

const struct scenario ring_large_scenario = {
    "ring-large", large_setup, again, {large_putter, taker_run}, false, false, large_end};
