/* rings.c - fuzz target: two clients that store anything in their rings, and the server of rings. The
 * arena must be sound after each step. */

#include "arena.h"

enum step { S_ADVANCE, S_PUT, S_JUNK, S_WORD, S_SERVE, S_TAKE, S_ROUSE, S_SLEEP, S_OPEN, S_OWN, S_LOOP,
            STEPS };

enum { SIZE = 512 };

struct client {
    struct pg_ring_pair words;
    uint8_t submissions[SIZE], completions[SIZE];
    struct pg_ring_end taker, putter;                    /* the daemon's side */
    struct pg_ring_end taken, put;                       /* the client's side */
    struct pg_ring_client served;
    struct pg_time_share share;
    uint64_t session, sequence;
    bool there;
};

static struct world {
    struct fuzz_arena f;
    uint8_t message[SIZE], large[FUZZ_MESSAGE];
    struct client clients[FUZZ_SESSIONS];
    struct pg_ring_server server;
    struct pg_time_shares shares;
    struct pg_loop_calls calls;
    int64_t now_ns;
    uint32_t waits;
} world;

static int64_t boot_ns(void *context) { return ((struct world *)context)->now_ns += 100; }

static void wake(void *context, uint32_t how, uint32_t *word, int socket)
{
    (void)context;
    if (word == NULL || how == PG_RING_AWAKE || socket < 0 || socket >= FUZZ_SESSIONS)
        abort();
}

static int wait_for_rings(void *context, struct pg_ring_server *s, int64_t until_boot_ns)
{
    struct world *w = context;
    for (uint32_t i = 0; i < FUZZ_SESSIONS; i++)
        if (w->clients[i].there)
            pg_rings_rouse(s, &w->clients[i].served);
    if (until_boot_ns == INT64_MIN || w->waits++ < 2)
        return PG_WOKEN_BY_RINGS;
    w->now_ns = until_boot_ns > w->now_ns ? until_boot_ns : w->now_ns;
    return w->waits < 5 ? PG_WOKEN_BY_TIME : PG_WOKEN_FOR_CALLER;
}

static void world_open(struct world *w)
{
    struct pg_config config = fuzz_config;
    config.clock_kind = PG_CLOCK_BOOT;
    config.now_ns = w->now_ns = 1000000000;
    memset(w->clients, 0, sizeof w->clients);
    fuzz_arena_open(&w->f, &config);
    w->calls = (struct pg_loop_calls){w, boot_ns, boot_ns, wake, wait_for_rings};
    w->shares = (struct pg_time_shares){.most_ns = 1000, .lasts_ns = 1000000000};
    w->server = (struct pg_ring_server){.calls = &w->calls, .message = w->message,
                                        .reply = w->f.reply};
}

static void greet(struct world *w, struct client *c)
{
    struct {
        struct pg_frame frame;
        struct pg_hello hello;
    } m = {.frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION, .message = PG_M_HELLO},
           .hello = {.nonce = {(uint8_t)(1 + c->share.uid)}}};
    struct pg_frame reply;
    struct pg_welcome welcome;
    if (fuzz_handle(&w->f, c->share.uid, w->now_ns, &m, sizeof m) != sizeof reply + sizeof welcome)
        return;
    memcpy(&welcome, w->f.reply + sizeof reply, sizeof welcome);
    c->session = welcome.session;
    c->sequence = welcome.last;
}

/* Open the rings of a client, instead of earlier ones. */
static void client_open(struct world *w, uint32_t number)
{
    struct client *c = &w->clients[number];
    if (c->there)
        pg_rings_remove(&w->server, &c->served);
    *c = (struct client){.share = {.uid = number}, .there = true};
    pg_ring_open(&c->taker, &c->words.submissions, c->submissions, SIZE);
    pg_ring_open(&c->put, &c->words.submissions, c->submissions, SIZE);
    pg_ring_open(&c->putter, &c->words.completions, c->completions, SIZE);
    pg_ring_open(&c->taken, &c->words.completions, c->completions, SIZE);
    greet(w, c);
    c->served = (struct pg_ring_client){.taker = &c->taker, .putter = &c->putter,
                                        .share = &c->share, .session = c->session,
                                        .socket = (int32_t)number};
    pg_rings_rouse(&w->server, &c->served);
}

/* Put a message of the client's session. */
static void put(struct input *in, struct client *c)
{
    static uint8_t bytes[FUZZ_MESSAGE];
    const uint64_t used = fuzz_message(in, take_byte(in), c->session, &c->sequence, bytes);
    if (c->put.length == 0)       /* a piece of another message would have to be followed */
        pg_ring_put(&c->put, bytes, used);
}

static void store_word(struct input *in, struct client *c)
{
    const uint8_t which = take_byte(in);
    struct pg_ring *words = which & 1 ? &c->words.submissions : &c->words.completions;
    uint64_t *word = which & 2 ? &words->tail : &words->head;
    *word = which & 4 ? *word + 8u * take_byte(in) : (uint64_t)take_short(in) << take_byte(in) % 60;
    words->putter_sleeps = which >> 4;
    words->taker_sleeps = which >> 6;
}

/* Do what the daemon does with a message that the server left. */
static void follow(struct world *w, uint32_t event)
{
    struct pg_ring_client *const s = w->server.client;
    struct client *const c = &w->clients[event > PG_RE_ENOUGH ? s->socket : 0];
    uint64_t used;
    switch ((enum pg_ring_event)event) {
    case PG_RE_NONE:
    case PG_RE_ENOUGH:
    case PG_RE_OFFENCE: break;
    case PG_RE_LOOK:
        if (c->taker.broken || s->gone) {
            pg_rings_remove(&w->server, s);
            c->there = false;
        } else if (pg_ring_next(&c->taker) > FUZZ_MESSAGE)
            s->gone = true;
        else if (pg_ring_next(&c->taker) != 0)
            pg_ring_take(&c->taker, w->large);
        s->replies = false;
        break;
    case PG_RE_MESSAGE:
    case PG_RE_AGAIN:
        used = fuzz_handle(&w->f, c->share.uid, w->now_ns, w->message, w->server.message_bytes);
        if (used != 0 && !pg_ring_put(&c->putter, w->f.reply, used))
            s->gone = true;
        break;
    case PG_RE_REPLY:
        s->replies = !pg_ring_put(&c->putter, w->f.reply, w->server.reply_bytes);
        break;
    }
}

static void serve(struct world *w, uint32_t most)
{
    pg_time_shares_begin(&w->shares, w->now_ns);
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t event = pg_rings_serve(w->f.a, &w->server, &w->shares, most);
        follow(w, event);
        if (event <= PG_RE_ENOUGH)
            return;
    }
}

static void loop(struct world *w, bool fires)
{
    struct pg_loop l = {.server = &w->server, .shares = &w->shares, .late_ns = 10000000,
                        .budget = 64, .most = 4, .fires = fires};
    w->waits = 0;
    if (pg_loop_wait(w->f.a, &l, w->now_ns + 1000000000) != 0)
        abort();
    follow(w, w->server.left);
    w->server.left = PG_RE_NONE;
}

static void advance(struct world *w, int64_t by_ns)
{
    int more = 1;
    w->now_ns += by_ns;
    for (uint32_t i = 0; more && i < 100; i++) {
        pg_advance(w->f.a, w->now_ns, 0, w->now_ns, 64, &more);
        pg_published(w->f.a, w->f.a->header->replay_tail, 0, 0);
    }
}

static void take_answers(struct client *c)
{
    static uint8_t bytes[PG_MESSAGE_MAX];
    while (pg_ring_next(&c->taken) != 0 && pg_ring_take(&c->taken, bytes)) {}
    pg_ring_sleep_taker(&c->taken, PG_RING_POLL);
}

static void step(struct world *w, struct input *in)
{
    const uint8_t choice = take_byte(in);
    const uint32_t number = choice / STEPS % FUZZ_SESSIONS;
    struct client *c = &w->clients[number];
    const enum step what = (enum step)(choice % STEPS);
    if (!c->there && what != S_ADVANCE && what != S_SERVE && what != S_LOOP)
        client_open(w, number);
    switch (what) {
    case S_ADVANCE: advance(w, (int64_t)take_byte(in) << 20); break;
    case S_PUT: put(in, c); break;
    case S_JUNK: c->submissions[take_short(in) % SIZE] = take_byte(in); break;
    case S_WORD: store_word(in, c); break;
    case S_SERVE: serve(w, 1 + take_byte(in) % 4); break;
    case S_TAKE: take_answers(c); break;
    case S_ROUSE: pg_rings_rouse(&w->server, &c->served); break;
    case S_SLEEP: pg_rings_sleep(&w->server); break;
    case S_OPEN: client_open(w, number); break;
    case S_OWN: c->served.session = take_byte(in) & 1 ? c->session : 0; break;
    case S_LOOP: loop(w, take_byte(in) & 1); break;
    case STEPS: break;
    }
    fuzz_whole(&w->f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    world_open(&world);
    client_open(&world, 0);
    client_open(&world, 1);
    while (in.at != in.end)
        step(&world, &in);
    return 0;
}
