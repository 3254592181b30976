/* router.c - fuzz target: two peers that send anything to a ROUTER socket, and the server of its
 * messages. The arena must be sound after each step. */

#include "arena.h"
#include "../c/router_socket.h"

enum step { S_ADVANCE, S_PUT, S_JUNK, S_SERVE, S_LOOP, S_OWN, S_BEHIND, S_FAIL, S_EACH, STEPS };

enum { ROWS = 2, DESCRIPTORS = 4 };

struct client {
    struct pg_ring_client served;
    struct pg_time_share share;
    uint8_t route[2];
    char user_id[16];
    uint64_t session, sequence;
};

static struct world {
    struct fuzz_arena f;
    struct client clients[FUZZ_SESSIONS];
    struct pg_ring_client *rows[ROWS];
    uint8_t completed[DESCRIPTORS];
    struct router_socket socket;
    struct pg_router router;
    struct pg_ring_server server;
    struct pg_time_shares shares;
    struct pg_loop_calls calls;
    int64_t now_ns;
    uint32_t waits;
} world;

static int64_t boot_ns(void *context) { return ((struct world *)context)->now_ns += 100; }

static void wake(void *context, uint32_t how, uint32_t *word, int socket)
{
    (void)context, (void)how, (void)word, (void)socket;
    abort();                      /* there are no rings */
}

static int wait_for_messages(void *context, struct pg_ring_server *s, int64_t until_boot_ns)
{
    struct world *w = context;
    s->router->quiet = false;
    return until_boot_ns == INT64_MIN || w->waits++ < 2 ? PG_WOKEN_BY_RINGS : PG_WOKEN_FOR_CALLER;
}

static void client_open(struct world *w, uint32_t number)
{
    struct client *c = &w->clients[number];
    struct {
        struct pg_frame frame;
        struct pg_hello hello;
    } m = {.frame = {.magic = PG_WIRE_MAGIC, .version = PG_WIRE_VERSION, .message = PG_M_HELLO},
           .hello = {.nonce = {(uint8_t)(1 + number)}}};
    struct pg_frame reply;
    *c = (struct client){.share = {.uid = number}, .route = {1, (uint8_t)number}};
    snprintf(c->user_id, sizeof c->user_id, "%u:%u:1", number, number);
    if (fuzz_handle(&w->f, c->share.uid, w->now_ns, &m, sizeof m) < sizeof reply)
        abort();
    memcpy(&reply, w->f.reply, sizeof reply);
    c->session = reply.session;
    c->served = (struct pg_ring_client){.share = &c->share, .session = c->session, .pid = 1,
                                        .route = c->route, .route_bytes = sizeof c->route,
                                        .user_id = c->user_id};
    w->rows[(uint16_t)c->session % ROWS] = &c->served;
}

static void world_open(struct world *w)
{
    struct pg_config config = fuzz_config;
    config.clock_kind = PG_CLOCK_BOOT;
    config.now_ns = w->now_ns = 1000000000;
    socket_close(&w->socket, &w->router);
    w->socket = (struct router_socket){0};
    fuzz_arena_open(&w->f, &config);
    w->calls = (struct pg_loop_calls){w, boot_ns, boot_ns, wake, wait_for_messages};
    w->shares = (struct pg_time_shares){.most_ns = 1000, .lasts_ns = 1000000000};
    w->router = (struct pg_router){.calls = &socket_calls, .socket = &w->socket,
                                   .clients = w->rows, .rows = ROWS, .completed = w->completed,
                                   .descriptors = DESCRIPTORS, .reply_max = 512};
    w->server = (struct pg_ring_server){.calls = &w->calls, .reply = w->f.reply,
                                        .router = &w->router};
    for (uint32_t i = 0; i < FUZZ_SESSIONS; i++)
        client_open(w, i);
}

/* Let a message wait whose sender has the route of one client and the credentials of one. */
static void send(struct world *w, struct client *c, uint8_t how, void *body, size_t bytes)
{
    struct client *other = &w->clients[how & 1];
    struct socket_message m = {.route_bytes = sizeof c->route, .body = body, .bytes = bytes,
                               .user_id = how & 2 ? other->user_id : c->user_id,
                               .connection = how % 8 - 2, .more = how >> 6 == 3 ? 2 : 0};
    memcpy(m.route, c->route, sizeof c->route);
    if (how >> 6 == 2)
        m.route_bytes = PG_ROUTE_MAX + (how & 1);
    socket_put(&w->socket, &m);
    w->router.quiet = false;
}

/* Put a message of the client's session. */
static void put(struct world *w, struct input *in, struct client *c)
{
    static uint8_t bytes[FUZZ_MESSAGE];
    const uint8_t kind = take_byte(in), how = take_byte(in);
    const uint64_t used = fuzz_message(in, kind, c->session, &c->sequence, bytes);
    send(w, c, how, bytes, used);
}

static void junk(struct world *w, struct input *in, struct client *c)
{
    static uint8_t bytes[256];
    const uint8_t how = take_byte(in), length = take_byte(in);
    take(in, bytes, length);
    send(w, c, how, bytes, length);
}

/* Do what the daemon does with a message that the server left. */
static void follow(struct world *w, uint32_t event)
{
    struct pg_router *const r = &w->router;
    if (event > PG_RE_ENOUGH && w->server.client != NULL)
        abort();
    switch ((enum pg_ring_event)event) {
    case PG_RE_NONE:
    case PG_RE_ENOUGH:
    case PG_RE_REPLY: break;
    case PG_RE_LOOK:
        if (!r->each && !r->rest)
            break;                /* a call has failed */
        if (!r->each && w->socket.rest == 0)
            abort();
        w->socket.rest = r->rest = 0;
        r->each = false;
        break;
    case PG_RE_MESSAGE:
    case PG_RE_AGAIN:
        fuzz_handle(&w->f, w->clients[r->route[1] % FUZZ_SESSIONS].share.uid, w->now_ns,
                    w->server.body, w->server.message_bytes);
        break;
    case PG_RE_OFFENCE:
        if (w->socket.rest == 0 && r->route_bytes <= PG_ROUTE_MAX)
            abort();
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

static void loop(struct world *w)
{
    struct pg_loop l = {.server = &w->server, .shares = &w->shares, .late_ns = 10000000,
                        .budget = 64, .most = 4};
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

/* Let the row of a client have a client of the socket, or none. */
static void own(struct world *w, struct client *c, bool owns)
{
    w->rows[(uint16_t)c->session % ROWS] = owns ? &c->served : NULL;
}

static void step(struct world *w, struct input *in)
{
    static const int errors[] = {EAGAIN, EINTR, EINVAL, 0};
    const uint8_t choice = take_byte(in);
    struct client *c = &w->clients[choice / STEPS % FUZZ_SESSIONS];
    switch ((enum step)(choice % STEPS)) {
    case S_ADVANCE: advance(w, (int64_t)take_byte(in) << 20); break;
    case S_PUT: put(w, in, c); break;
    case S_JUNK: junk(w, in, c); break;
    case S_SERVE: serve(w, 1 + take_byte(in) % 4); break;
    case S_LOOP: loop(w); break;
    case S_OWN: own(w, c, take_byte(in) & 1); break;
    case S_BEHIND: c->served.behind = take_byte(in) & 1; break;
    case S_FAIL:
        w->socket.fails = errors[take_byte(in) % 4];
        w->socket.send_fails = errors[take_byte(in) % 4];
        break;
    case S_EACH: w->router.each = true; break;
    case STEPS: break;
    }
    fuzz_whole(&w->f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    world_open(&world);
    while (in.at != in.end)
        step(&world, &in);
    return 0;
}
