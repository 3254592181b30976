/* A worked example of purgatoryd.h, which `tests/test_c_client.py` runs while it kills the daemon.
 *
 *     demo work DIR/NAME COUNT    arm COUNT timers, cancel every third, print each answer;
 *                                 SIGTERM ends it after the answers to what it has sent
 *     demo listen DIR/NAME        print the notices, and the ranges that were lost
 *     demo consume DIR/NAME       take jobs, and print the begin and the ack of each, with the time
 *                                 of CLOCK_MONOTONIC in ns; SIGTERM ends it
 *     demo dead DIR/NAME          take three jobs: fail, reject and release them
 *     demo options DIR/NAME       arm a timer with all options, and print the answer
 *     demo ends DIR/NAME COUNT    take COUNT jobs, and print how each ended
 *     demo hold DIR/NAME MS       take a job with a lease of 0.6 s, and acknowledge it after MS ms
 *
 *     cc -std=gnu11 -O2 *.c -lzmq -o demo */
#include "purgatoryd.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUND 60 /* records between two flushes */
#define LEASE_MS 30000

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
        const struct pg_timer timer = {.key = keys[n], .payload = "pay up", .payload_len = 6,
                                       .deadline_ns = boot_ns() + (first + n) % 50 * 4000000};
        snprintf(keys[n], sizeof keys[n], "order:%ld", first + n);
        pg_put(client, topic, &timer, &put[n]);
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

/* Arm a timer with all options. */
static int arm_with_options(const char *daemon)
{
    const struct pg_timer timer = {
        .key = "order:1",
        .payload = "pay up",
        .payload_len = 6,
        .deadline_ns = boot_ns() + 3600 * INT64_C(1000000000),
        .mode = PG_MODE_REPLACE,
        .tag = "customer of the north",
        .order_key = "a customer whose key has more bytes than a block of the hash function has",
        .has_priority = true,
        .priority = 7,
        .has_late = true,
        .late = PG_LATE_SKIP,
        .late_grace_ns = 500000000,
        .unique_ns = 60 * INT64_C(1000000000),
    };
    struct pg_answer answer;
    char endpoint[256];
    snprintf(endpoint, sizeof endpoint, "ipc://%s.cmd", daemon);
    struct pg_client *client = pg_open(endpoint, "demo in C");
    if (client == NULL)
        return 1;
    pg_put(client, topic, &timer, &answer);
    const bool good = pg_flush(client);
    if (good)
        printf("%d\n", answer.status);
    else
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

static struct pg_consumer *join(const char *daemon, int64_t lease_ms)
{
    const struct pg_group group = {.namespace = topic.namespace, .name = "mailers",
                                   .topics = topics, .lease_ns = lease_ms * 1000000,
                                   .max_in_flight = 8};
    char endpoint[256];
    snprintf(endpoint, sizeof endpoint, "ipc://%s.cmd", daemon);
    struct pg_consumer *consumer = pg_consume(endpoint, "demo in C", &group);
    signal(SIGTERM, stop);
    return consumer;
}

/* Return the next job; NULL after an error. */
static const struct pg_job *next_job(struct pg_consumer *consumer)
{
    const struct pg_job *job = NULL;
    while (job == NULL && pg_consumer_error(consumer) == NULL)
        job = pg_take(consumer, 1000);
    return job;
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
    struct pg_consumer *consumer = join(daemon, LEASE_MS);
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
    struct pg_consumer *consumer = join(daemon, LEASE_MS);
    if (consumer == NULL)
        return 1;
    for (int n = 0; n < 3; n++) {
        const struct pg_job *job = next_job(consumer);
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

static void print_end(const struct pg_job *job)
{
    const struct pg_end *e = &job->end;
    printf("%.*s %d %.*s", (int)job->key_len, job->key, e->cause, (int)job->payload_len,
           (const char *)job->payload);
    if (e->has_verdict)
        printf(" verdict %" PRIu32 " %d %d", e->verdict.error, e->verdict.keys, e->missing[0]);
    if (e->is_occurrence)
        printf(" occurrence %.*s %" PRId64, (int)e->schedule_len, job->key, e->nominal_ns);
    printf("\n");
}

/* Take jobs, and print how each ended. */
static int print_ends(const char *daemon, long count)
{
    struct pg_consumer *consumer = join(daemon, LEASE_MS);
    if (consumer == NULL)
        return 1;
    while (count-- > 0) {
        const struct pg_job *job = next_job(consumer);
        if (job == NULL)
            break;
        print_end(job);
        pg_ack(consumer, job);
    }
    return end(consumer);
}

/* Take a job with a short lease, and acknowledge it after a while. Print its attempt, whether the
 * lease was lost, and the answer. */
static int hold(const char *daemon, long ms)
{
    const struct timespec pause = {.tv_nsec = 5000000};
    struct pg_consumer *consumer = join(daemon, 600);
    if (consumer == NULL)
        return 1;
    const struct pg_job *job = next_job(consumer);
    printf("held\n");
    fflush(stdout);
    const int64_t until_ns = boot_ns() + ms * 1000000;
    while (job != NULL && boot_ns() < until_ns && pg_keep(consumer))
        nanosleep(&pause, NULL);
    if (job != NULL && pg_consumer_error(consumer) == NULL) {
        const uint32_t attempt = job->attempt;
        const int lost = pg_is_lost(job);
        printf("%" PRIu32 " %d %d\n", attempt, lost, pg_ack(consumer, job));
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
    if (argc == 3 && strcmp(argv[1], "options") == 0)
        return arm_with_options(argv[2]);
    if (argc == 4 && strcmp(argv[1], "ends") == 0)
        return print_ends(argv[2], atol(argv[3]));
    if (argc == 4 && strcmp(argv[1], "hold") == 0)
        return hold(argv[2], atol(argv[3]));
    fprintf(stderr, "usage: demo {work|ends|hold} DIR/NAME NUMBER | "
                    "demo {listen|consume|dead|options} DIR/NAME\n");
    return 2;
}
