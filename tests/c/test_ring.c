/* Test the rings: messages of all sizes against a model, and a hostile other side. */
#include "check.h"
#include "core/core.h"

enum { SIZE = 256, LONGEST = 4 * SIZE, PATTERN = 251 };

struct both {
    struct pg_ring words;
    uint8_t bytes[SIZE];
    struct pg_ring_end putter, taker;
};

static struct both *both_new(void)
{
    struct both *b = aligned_alloc(64, (sizeof *b + 63) / 64 * 64);
    CHECK(b != NULL);
    memset(b, 0, sizeof *b);
    pg_ring_open(&b->putter, &b->words, b->bytes, SIZE);
    pg_ring_open(&b->taker, &b->words, b->bytes, SIZE);
    return b;
}

static void fill(uint8_t *message, uint64_t length, uint64_t number)
{
    for (uint64_t i = 0; i < length; i++)
        message[i] = (uint8_t)((i + number) % PATTERN);
}

static uint64_t length_of(uint64_t number) { return 1 + number * 7919 % LONGEST; }

static void take_what_is_there(struct both *b, uint8_t *out, uint64_t *taken)
{
    uint8_t expected[LONGEST];
    uint64_t length;
    while ((length = pg_ring_next(&b->taker)) != 0) {
        CHECK_EQUAL(length, length_of(*taken));
        if (!pg_ring_take(&b->taker, out))
            continue;
        fill(expected, length, *taken);
        CHECK(memcmp(out, expected, length) == 0);
        ++*taken;
    }
}

static void test_messages_of_all_sizes_arrive_in_order(void)
{
    struct both *b = both_new();
    struct rng rng = {7};
    uint8_t message[LONGEST], out[LONGEST];
    uint64_t put = 0, taken = 0;
    while (taken < 20000) {
        for (uint64_t tries = rng_below(&rng, 8); tries > 0; tries--) {
            fill(message, length_of(put), put);
            if (!pg_ring_put(&b->putter, message, length_of(put)))
                break;
            put++;
        }
        if (rng_below(&rng, 2) == 0)
            take_what_is_there(b, out, &taken);
    }
    CHECK(!b->putter.broken && !b->taker.broken);
    free(b);
}

static void test_a_small_message_goes_whole_or_not_at_all(void)
{
    struct both *b = both_new();
    uint8_t message[SIZE] = {1};
    CHECK(pg_ring_put(&b->putter, message, SIZE - 64));
    const uint64_t tail = b->words.tail;
    CHECK(!pg_ring_put(&b->putter, message, 64));
    CHECK_EQUAL(b->words.tail, tail);
    CHECK(pg_ring_put(&b->putter, message, 48));
    free(b);
}

static void test_impossible_positions_break_the_ring_and_nothing_else(void)
{
    static const uint64_t hostile[] = {1, 7, SIZE + 8, 2 * SIZE, UINT64_MAX, UINT64_MAX - 7,
                                       1ull << 63};
    for (uint32_t i = 0; i < sizeof hostile / sizeof hostile[0]; i++) {
        struct both *b = both_new();
        b->words.tail = hostile[i];
        CHECK_EQUAL(pg_ring_next(&b->taker), 0);
        CHECK(b->taker.broken);
        CHECK(pg_ring_sleep_taker(&b->taker, PG_RING_POLL) == 0);
        uint8_t message[SIZE] = {0};
        CHECK(pg_ring_put(&b->putter, message, SIZE / 2));
        b->words.head = hostile[i] / 2 + SIZE;
        CHECK(!pg_ring_put(&b->putter, message, SIZE / 2) && b->putter.broken);
        free(b);
    }
}

static void test_impossible_lengths_break_the_ring(void)
{
    static const uint64_t hostile[] = {0, PG_MESSAGE_MAX + 1, UINT64_MAX, UINT64_MAX - 6,
                                       1ull << 32};
    for (uint32_t i = 0; i < sizeof hostile / sizeof hostile[0]; i++) {
        struct both *b = both_new();
        memcpy(b->bytes, &hostile[i], sizeof hostile[i]);
        b->words.tail = 16;
        CHECK_EQUAL(pg_ring_next(&b->taker), 0);
        CHECK(b->taker.broken);
        free(b);
    }
}

/* The other side may store anything at any moment; the sanitizers see each access outside. */
static void test_a_ring_survives_random_words(void)
{
    struct rng rng = {11};
    uint8_t *out = malloc(PG_MESSAGE_MAX), message[LONGEST] = {0};
    CHECK(out != NULL);
    for (uint32_t round = 0; round < 20000; round++) {
        struct both *b = both_new();
        for (uint32_t step = 0; step < 12; step++) {
            uint64_t *word = rng_below(&rng, 2) != 0 ? &b->words.tail : &b->words.head;
            *word += rng_below(&rng, 3) != 0 ? 8 * rng_below(&rng, 40) : rng_next(&rng);
            if (rng_below(&rng, 2) != 0)
                b->bytes[rng_below(&rng, SIZE)] = (uint8_t)rng_next(&rng);
            if (pg_ring_next(&b->taker) != 0)
                pg_ring_take(&b->taker, out);
            pg_ring_put(&b->putter, message, 1 + rng_below(&rng, LONGEST));
            b->putter.length = 0;
        }
        free(b);
    }
    free(out);
}

static void test_the_side_that_sleeps_is_roused_once(void)
{
    struct both *b = both_new();
    uint8_t message[SIZE] = {0};
    CHECK(pg_ring_sleep_taker(&b->taker, PG_RING_FUTEX));
    CHECK(pg_ring_put(&b->putter, message, 8));
    CHECK_EQUAL(pg_ring_rouse_taker(&b->putter), PG_RING_FUTEX);
    CHECK_EQUAL(pg_ring_rouse_taker(&b->putter), PG_RING_AWAKE);
    CHECK(!pg_ring_sleep_taker(&b->taker, PG_RING_POLL));
    while (pg_ring_put(&b->putter, message, 8)) {}
    CHECK(pg_ring_sleep_putter(&b->putter, PG_RING_POLL));
    for (uint32_t i = 0; i < SIZE / 16; i++)
        CHECK(pg_ring_next(&b->taker) == 8 && pg_ring_take(&b->taker, message));
    CHECK_EQUAL(pg_ring_rouse_putter(&b->taker), PG_RING_POLL);
    CHECK(!pg_ring_sleep_putter(&b->putter, PG_RING_POLL));
    free(b);
}

static void test_a_putter_sleeps_until_its_message_has_space(void)
{
    struct both *b = both_new();
    uint8_t message[SIZE] = {0};
    CHECK(pg_ring_put(&b->putter, message, 56));
    CHECK(!pg_ring_put(&b->putter, message, SIZE - 64));
    CHECK(pg_ring_sleep_putter(&b->putter, PG_RING_POLL));
    CHECK(pg_ring_next(&b->taker) == 56 && pg_ring_take(&b->taker, message));
    CHECK_EQUAL(pg_ring_rouse_putter(&b->taker), PG_RING_POLL);
    CHECK(!pg_ring_sleep_putter(&b->putter, PG_RING_POLL));
    CHECK(pg_ring_put(&b->putter, message, SIZE - 64));
    free(b);
}

int main(void)
{
    RUN(test_messages_of_all_sizes_arrive_in_order);
    RUN(test_a_small_message_goes_whole_or_not_at_all);
    RUN(test_impossible_positions_break_the_ring_and_nothing_else);
    RUN(test_impossible_lengths_break_the_ring);
    RUN(test_a_ring_survives_random_words);
    RUN(test_the_side_that_sleeps_is_roused_once);
    RUN(test_a_putter_sleeps_until_its_message_has_space);
    return 0;
}
