/* Functions of client.c for sessions, which consumer.c calls. */
#ifndef SESSION_H
#define SESSION_H

#include "purgatoryd.h"

struct record {
    uint8_t op, mode, key_type, key_len;
    uint16_t name;
    uint8_t time_kind, flags;
    uint32_t payload_len, ext_len;
    int64_t time_ns;
    uint64_t value;
};

struct bytes {
    const void *at;
    size_t length;
};

/* Calls for a consumer. `context` is its argument. */
struct pg_hooks {
    void *context;
    void (*on_open)(void *context);    /* after a welcome and a reconnect */
    void (*on_expired)(void *context); /* another session replaces this one */
    void (*on_jobs)(void *context, struct bytes body, uint32_t count);
};

/* A reply to pg_ask(). */
struct pg_reply {
    uint16_t error; /* 0 = none */
    uint32_t count;
    uint64_t detail[2];
    char *body; /* to be freed */
    size_t length;
};

/* The bytes of a record. */
struct pg_content {
    struct bytes key, payload, extension;
};

int64_t pg_boot_ns(void);

/* Let all later calls fail with this error. Return false. */
bool pg_fail(struct pg_client *client, const char *error);

void pg_hook(struct pg_client *client, struct pg_hooks hooks);

/* Pack a record with its bytes, whose lengths it gets. `answer` is filled when it comes. Return false
 * after an error. */
bool pg_pack(struct pg_client *client, struct pg_topic topic, struct pg_content content,
             struct record record, struct pg_answer *answer);

/* Send what is packed, and wait for messages, at most until `until_ns` on CLOCK_BOOTTIME. */
bool pg_step(struct pg_client *client, int64_t until_ns);

/* Ask a question that may be repeated, and wait for the reply. Return false after an error. */
bool pg_ask(struct pg_client *client, uint16_t message, struct bytes body, struct pg_reply *reply);

/* Send a PING without waiting for its answer. */
void pg_ping(struct pg_client *client);

#endif
