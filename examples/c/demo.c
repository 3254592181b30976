/* A worked example of purgatoryd.h, which `tests/test_c_client.py` runs while it kills the daemon.
 *
 *     demo work DIR/NAME COUNT    arm COUNT timers, cancel every third, print each answer;
 *                                 SIGTERM ends it after the answers to what it has sent
 *     demo listen DIR/NAME        print the notices, and the ranges that were lost
 *     demo consume DIR/NAME       take jobs, and print the begin and the ack of each, with the time
 *                                 of CLOCK_MONOTONIC in ns; SIGTERM ends it
 *     demo dead DIR/NAME          take three jobs: fail, reject and release them
 *
 *     cc -std=gnu11 -O2 demo.c client.c listener.c consumer.c -lzmq -o demo */
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

static const char *const topics[] = {"orders", NULL};

static struct pg_consumer *join(const char *daemon)
{
    const struct pg_group group = {.namespace = topic.namespace, .name = "mailers",
                                   .topics = topics, .lease_ns = 30 * INT64_C(1000000000),
                                   .max_in_flight = 8};
    char endpoint[256];
    snprintf(endpoint, sizeof endpoint, "ipc://%s.cmd", daemon);
    struct pg_consumer *consumer = pg_consume(endpoint, "demo in C", &group);
    signal(SIGTERM, stop);
    return consumer;
}

static int end(struct pg_consumer *consumer)
{
    const char *error = pg_consumer_error(consumer);
    const int code = error == NULL ? 0 : 1;
    if (error != NULL)
        fprintf(stderr, "demo: %s\n", error);
    pg_leave(consumer);
    return code;
}

static void print_job(const char *event, const struct pg_job *job)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    printf("%s %" PRIu64 " %" PRIu32 " %" PRId64, event, job->ticket, job->attempt,
           now.tv_sec * INT64_C(1000000000) + now.tv_nsec);
}

static int consume(const char *daemon)
{
    const struct timespec pause = {.tv_nsec = 2000000};
    struct pg_consumer *consumer = join(daemon);
    if (consumer == NULL)
        return 1;
    if (pg_consumer_error(consumer) == NULL)
        printf("ready\n");
    fflush(stdout);
    while (!stopped && pg_consumer_error(consumer) == NULL) {
        const struct pg_job *job = pg_take(consumer, 100);
        if (job == NULL)
            continue;
        print_job("start", job);
        printf(" %.*s %.*s\n", (int)job->key_len, job->key, (int)job->payload_len,
               (const char *)job->payload);
        fflush(stdout);
        nanosleep(&pause, NULL);
        const struct pg_job done = *job; /* the answer frees the job */
        if (pg_ack(consumer, job) == PG_DONE) {
            print_job("acked", &done);
            printf("\n");
            fflush(stdout);
        }
    }
    return end(consumer);
}

/* Answer jobs by all means except an ack, and print the answers and whether the lease was lost. */
static int fail_some(const char *daemon)
{
    struct pg_consumer *consumer = join(daemon);
    if (consumer == NULL)
        return 1;
    for (int n = 0; n < 3; n++) {
        const struct pg_job *job = NULL;
        while (job == NULL && pg_consumer_error(consumer) == NULL)
            job = pg_take(consumer, 1000);
        if (job == NULL)
            break;
        const int lost = pg_is_lost(job);
        const uint32_t attempt = job->attempt;
        const int status = n == 0   ? pg_nack(consumer, job, -1, "no stamps")
                           : n == 1 ? pg_release(consumer, job)
                                    : pg_reject(consumer, job, "no address");
        printf("%" PRIu32 " %d %d\n", attempt, lost, status);
    }
    return end(consumer);
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "work") == 0)
        return work(argv[2], atol(argv[3]));
    if (argc == 3 && strcmp(argv[1], "listen") == 0)
        return listen_forever(argv[2]);
    if (argc == 3 && strcmp(argv[1], "consume") == 0)
        return consume(argv[2]);
    if (argc == 3 && strcmp(argv[1], "dead") == 0)
        return fail_some(argv[2]);
    fprintf(stderr, "usage: demo work DIR/NAME COUNT | demo {listen|consume|dead} DIR/NAME\n");
    return 2;
}
