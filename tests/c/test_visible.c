/* One word, `visible`, decides which notices exist for everybody: PUB, tail heartbeats, gap filling,
 * REPLAY, a cancel's FIRED, and the readers that are woken. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>

#include "check.h"
#include "core/core.h"

enum { LAYOUT = 4711, TOPICS = 24, OUT = 1 << 16, TICK_NS = 1000 };

static struct pg_arena *a;
static void *arena, *secret;
static uint8_t out[OUT];
static int64_t now_ns;
static const void *woken[4 * TOPICS];         /* words of the FUTEX_WAKE calls, in order */
static uint32_t wakes;

/* The linker prefers this function to that of the C library, so the test sees each call. */
long syscall(long number, ...)
{
    va_list arguments;
    va_start(arguments, number);
    const void *word = va_arg(arguments, const void *);
    const int operation = va_arg(arguments, int);
    va_end(arguments);
    CHECK(number == SYS_futex && operation == FUTEX_WAKE && wakes < 4 * TOPICS);
    woken[wakes++] = word;
    return 0;
}

/* ---- set-up ------------------------------------------------------------------------------ */

static void arena_open(void)
{
    const struct pg_config c = {
        .layout_id = LAYOUT, .payload_bytes = 65536, .replay_bytes_max = 16384,
        .tick_ns = TICK_NS, .stream_id = 1, .secret = {1, 2}, .capacity = 2 * TOPICS,
        .replay_capacity = 128, .fanout = 8, .namespaces = 2, .topics = TOPICS, .sessions = 2,
        .watches = 8, .watermarks = 4, .accounts = 1, .inbox_max = 8,
        .clock_kind = PG_CLOCK_VIRTUAL};
    arena = zeroed(pg_arena_bytes(&c));
    secret = zeroed(pg_private_bytes(&c));
    a = malloc(pg_handle_bytes());
    CHECK(a != NULL && pg_create(a, arena, secret, &c));
    now_ns = 0;
}

static void arena_close(void)
{
    struct pg_fault fault;
    CHECK(pg_check(a, &fault));
    free(arena);
    free(secret);
    free(a);
}

static struct pg_put put_of(uint8_t topic, const uint8_t *key)
{
    static char name[1];
    name[0] = (char)topic;
    return (struct pg_put){.namespace_name = topic < 'a' ? "m" : "n", .namespace_len = 1,
                           .topic_name = name, .topic_len = 1, .key = key, .key_len = 1,
                           .key_type = PG_KEY_BYTES, .time_ns = now_ns + TICK_NS};
}

static void arm(uint8_t topic, uint8_t key)
{
    struct pg_result r;
    const struct pg_put put = put_of(topic, &key);
    pg_put(a, &put, &r);
    CHECK((r.ticket & 0xff) == PG_ST_ADDED);
}

static void advance(void)
{
    int more;
    now_ns += 10 * TICK_NS;
    pg_advance(a, now_ns, 0, now_ns, 1000, &more);
}

/* Arms and fires `count` timers of topic t, with the keys 1, 2, ... in this order. */
static void fire(uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        arm('t', (uint8_t)(1 + i));
        advance();
    }
}

static unsigned cancelled(uint8_t key)
{
    struct pg_result r;
    const struct pg_put put = put_of('t', &key);
    pg_cancel(a, &put, 0, &r);
    return (unsigned)(r.ticket & 0xff);
}

/* ---- what one sees of the notices --------------------------------------------------------- */

/* Return the number of notices that PUB would send. */
static uint32_t to_send(void)
{
    struct pg_part parts[4];
    uint64_t upto;
    uint32_t sum = 0;
    const uint32_t count = pg_notices(a, out, OUT, parts, 4, &upto);
    for (uint32_t i = 0; i < count; i++) {
        struct pg_notices head;
        memcpy(&head, out + parts[i].body, sizeof head);
        CHECK_EQUAL(head.tail, head.first + head.count - 1);
        sum += head.count;
    }
    CHECK_EQUAL(upto, a->header->published + sum);
    return sum;
}

/* Return the highest sequence of topic 0 that a REPLAY, or a subscriber that fills a gap, gets. */
static uint64_t replayed(void)
{
    uint64_t positions[16], lost, got;
    const uint64_t used = pg_replay(a, 0, 1, 16, positions, out, OUT, &lost, &got);
    CHECK_EQUAL(lost, 0);
    CHECK((used == 0) == (got == 0));
    return got;
}

/* Return the newest sequence that a tail heartbeat of topic 0 announces. */
static uint64_t announced(void)
{
    struct pg_part parts[TOPICS];
    struct pg_notices head;
    uint32_t cursor = 0;
    CHECK_EQUAL(pg_tail_heartbeats(a, 0, &cursor, out, OUT, parts, TOPICS), 1);
    memcpy(&head, out + parts[0].body, sizeof head);
    CHECK_EQUAL(head.first, head.tail + 1);
    return head.tail;
}

static void seen_up_to(uint64_t sequence)
{
    struct pg_known_topic known[TOPICS] = {{0}}, found[TOPICS];
    CHECK_EQUAL(to_send(), sequence);
    CHECK_EQUAL(replayed(), sequence);
    CHECK_EQUAL(announced(), sequence);
    CHECK_EQUAL(pg_newest(a, 0), sequence);
    CHECK_EQUAL(pg_changed_topics(a, 0, NULL, 0, known, found), 1);
    CHECK_EQUAL(found[0].sequence, sequence);
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void all_obey_the_visible_word(void)
{
    for (uint64_t visible = 0; visible <= 3; visible++) {
        arena_open();
        fire(3);
        CHECK_EQUAL(a->header->visible, 3);
        a->header->visible = visible;
        seen_up_to(visible);
        for (uint8_t key = 1; key <= 3; key++)
            CHECK_EQUAL(cancelled(key), key <= visible ? PG_ST_FIRED : PG_ST_BUSY);
        pg_published(a, 3, 0, 0);
        CHECK_EQUAL(a->header->published, visible == 3 ? 3 : 0);
        pg_show(a);
        CHECK_EQUAL(pg_newest(a, 0), 3);
        CHECK_EQUAL(cancelled(3), PG_ST_FIRED);
        arena_close();
    }
}

static void the_newest_sent_notice_is_below_published(void)
{
    arena_open();
    CHECK_EQUAL(pg_newest_sent(a, 0), 0);
    fire(3);
    for (uint64_t published = 0; published <= 3; published++) {
        a->header->published = published;
        CHECK_EQUAL(pg_newest_sent(a, 0), published);
        CHECK_EQUAL(pg_newest(a, 0), 3);
    }
    arena_close();
}

static void the_newest_notice_may_have_left_the_replay_buffer(void)
{
    arena_open();
    fire(2);
    for (uint32_t i = 0; i < 128; i++) {
        pg_published(a, a->header->replay_tail, 0, 0);
        arm('u', 1);
        advance();
    }
    CHECK(a->header->replay_head >= 2);
    pg_published(a, a->header->replay_tail, 0, 0);
    fire(2);
    a->header->visible -= 2;
    CHECK_EQUAL(pg_newest(a, 0), 2);
    a->header->visible += 1;
    CHECK_EQUAL(pg_newest(a, 0), 3);
    arena_close();
}

static void a_rebuild_shows_what_has_fired(void)
{
    struct pg_fault fault;
    arena_open();
    fire(3);
    a->header->visible = 1;
    CHECK(pg_rebuild(a, now_ns, &fault));
    seen_up_to(3);
    arena_close();
}

static bool was_woken(const uint32_t *word)
{
    for (uint32_t i = 0; i < wakes; i++)
        if (woken[i] == word)
            return true;
    return false;
}

static void each_word_is_woken_once_and_no_other(void)
{
    arena_open();
    for (uint8_t topic = 'a'; topic < 'a' + 20; topic++)
        arm(topic, topic);
    arm('B', 'B');
    advance();
    pg_show(a);
    for (uint8_t i = 0; i < 10; i++)
        arm('a' + i % 2, i);
    advance();
    const uint32_t other = a->topics[2].wake, elsewhere = a->namespaces[1].wake;
    wakes = 0;
    pg_show(a);
    CHECK_EQUAL(wakes, 3);        /* two topics and their namespace */
    CHECK(was_woken(&a->topics[0].wake) && was_woken(&a->topics[1].wake));
    CHECK(was_woken(&a->namespaces[0].wake));
    CHECK_EQUAL(a->topics[2].wake, other);
    CHECK_EQUAL(a->namespaces[1].wake, elsewhere);
    pg_show(a);
    CHECK_EQUAL(wakes, 3);
    arena_close();
}

static void readers_of_a_row_are_woken_when_another_topic_gets_it(void)
{
    arena_open();
    for (uint8_t i = 0; i < TOPICS; i++)
        arm('a' + i, i);
    struct pg_result r;
    const uint8_t key = 5;
    const struct pg_put put = put_of('a' + 5, &key);
    pg_cancel(a, &put, 0, &r);
    const uint32_t before = a->topics[5].wake, names = a->header->wake;
    wakes = 0;
    arm('a' + TOPICS, key);
    CHECK_EQUAL(a->topics[5].name[0], 'a' + TOPICS);
    CHECK(wakes == 1 && was_woken(&a->topics[5].wake));
    CHECK_EQUAL(a->topics[5].wake, before + 1);
    CHECK_EQUAL(a->header->wake, names);
    arena_close();
}

static void readers_without_a_namespace_are_woken_when_one_is_born(void)
{
    arena_open();
    wakes = 0;
    arm('t', 1);
    CHECK(was_woken(&a->header->wake));
    wakes = 0;
    arm('u', 2);
    CHECK(!was_woken(&a->header->wake));
    arena_close();
}

int main(void)
{
    RUN(all_obey_the_visible_word);
    RUN(the_newest_sent_notice_is_below_published);
    RUN(the_newest_notice_may_have_left_the_replay_buffer);
    RUN(a_rebuild_shows_what_has_fired);
    RUN(each_word_is_woken_once_and_no_other);
    RUN(readers_of_a_row_are_woken_when_another_topic_gets_it);
    RUN(readers_without_a_namespace_are_woken_when_one_is_born);
    return 0;
}
