/* A worked example of purgatoryd.h, which `tests/test_c_client.py` runs while it kills the daemon.
 *
 *     demo work DIR/NAME COUNT    arm COUNT timers, cancel every third, print each answer;
 *                                 SIGTERM ends it after the answers to what it has sent
 *     demo listen DIR/NAME        print the notices, and the ranges that were lost
 *
 *     cc -std=gnu11 -O2 demo.c client.c listener.c -lzmq -o demo */
#include "purgatoryd.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUND 60 /* records between two flushes */

static const struct pg_topic topic = {"shop", "orders"};

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

static int64_t boot_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Arm the timers `first` to `first` + `count` - 1, cancel every third, and print the answers. */
static bool work_round(struct pg_client *client, long first, long count)
{
    char keys[ROUND][32];
    struct pg_answer put[ROUND], cancelled[ROUND];
    for (long n = 0; n < count; n++) {
        const int64_t delay_ns = (first + n) % 50 * 4000000;
        snprintf(keys[n], sizeof keys[n], "order:%ld", first + n);
        pg_put(client, topic, keys[n], "pay up", 6, boot_ns() + delay_ns, PG_MODE_ERROR, &put[n]);
    }
    if (!pg_flush(client))
        return false;
    for (long n = 0; n < count; n += 3)
        pg_cancel(client, topic, keys[n], put[n].ticket, &cancelled[n]);
    if (!pg_flush(client))
        return false;
    for (long n = 0; n < count; n++)
        printf("%s %" PRIu64 " %d %d\n", keys[n], put[n].ticket, put[n].status,
               n % 3 == 0 ? cancelled[n].status : 0);
    fflush(stdout);
    return true;
}

static int work(const char *daemon, long count)
{
    char endpoint[256];
    snprintf(endpoint, sizeof endpoint, "ipc://%s.cmd", daemon);
    struct pg_client *client = pg_open(endpoint, "demo in C");
    if (client == NULL)
        return 1;
    signal(SIGTERM, stop);
    bool good = true;
    for (long done = 0; good && !stopped && done < count; done += ROUND)
        good = work_round(client, done, count - done < ROUND ? count - done : ROUND);
    if (!good)
        fprintf(stderr, "demo: %s\n", pg_error(client));
    pg_close(client);
    return good ? 0 : 1;
}

static int listen_forever(const char *daemon)
{
    char endpoint[256];
    struct pg_notice notice;
    snprintf(endpoint, sizeof endpoint, "ipc://%s.pub", daemon);
    struct pg_listener *listener = pg_listen(endpoint, topic);
    if (listener == NULL)
        return 1;
    for (;;) {
        switch (pg_next(listener, &notice, 1000)) {
        case PG_NOTICE:
            printf("notice %" PRIu64 " %" PRIu64 " %" PRId64 " %.*s %.*s\n", notice.sequence,
                   notice.ticket, notice.fired_ns - notice.deadline_ns, (int)notice.key_len,
                   notice.key, (int)notice.payload_len, (const char *)notice.payload);
            break;
        case PG_LOST:
            printf("lost %" PRIu64 " %" PRIu64 "\n", notice.sequence, notice.lost_to);
            break;
        case PG_NEW_STREAM:
            printf("new stream\n");
            break;
        case PG_SILENCE:
            break;
        case PG_FAILED:
            pg_unlisten(listener);
            return 1;
        }
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "work") == 0)
        return work(argv[2], atol(argv[3]));
    if (argc == 3 && strcmp(argv[1], "listen") == 0)
        return listen_forever(argv[2]);
    fprintf(stderr, "usage: demo work DIR/NAME COUNT | demo listen DIR/NAME\n");
    return 2;
}
