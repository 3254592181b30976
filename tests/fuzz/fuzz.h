/* fuzz.h - common parts of the fuzz targets: bytes of the input, and an arena to apply them to.
 *
 * A target is a program over its input: it takes what it needs off the front, and zeros once the
 * input has ended, so that every input means something and a shorter one is a prefix of it. */
#ifndef PURGATORYD_FUZZ_H
#define PURGATORYD_FUZZ_H

#include <stdio.h>
#include <stdlib.h>

#include "core/core.h"

/* Called by libFuzzer, and by tests/fuzz/main.c for every file of the corpus. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FUZZ_LAYOUT = 4711, FUZZ_TICK_NS = 1000000, FUZZ_SESSIONS = 2 };

/* Small, so that everything in it fills up and wraps within a short input. */
static const struct pg_config fuzz_config = {
    .layout_id = FUZZ_LAYOUT, .payload_bytes = 8192, .replay_bytes_max = 4096,
    .tick_ns = FUZZ_TICK_NS, .stream_id = 1, .secret = {1, 2}, .capacity = 12,
    .replay_capacity = 16, .fanout = 3, .namespaces = 2, .topics = 3,
    .sessions = FUZZ_SESSIONS, .clock_kind = PG_CLOCK_VIRTUAL, .watches = 24, .watermarks = 8,
    .watermark_ttl_ns = 1000000000, .inbox_max = 6};

struct input {
    const uint8_t *at, *end;
};

static inline void take(struct input *in, void *out, size_t bytes)
{
    const size_t left = (size_t)(in->end - in->at), some = bytes < left ? bytes : left;
    memset(out, 0, bytes);
    memcpy(out, in->at, some);
    in->at += some;
}

static inline uint8_t take_byte(struct input *in)
{
    uint8_t byte;
    take(in, &byte, sizeof byte);
    return byte;
}

static inline uint16_t take_short(struct input *in)
{
    uint16_t value;
    take(in, &value, sizeof value);
    return value;
}

/* Return zeroed memory of exactly that size, so that ASan finds accesses outside. */
static inline void *fuzz_memory(uint64_t bytes)
{
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (memory == NULL)
        abort();
    return memset(memory, 0, bytes);
}

static inline void fuzz_expect(bool good, const struct pg_fault *fault)
{
    if (good)
        return;
    fprintf(stderr, "%s: %s at %llu: expected %llu, found %llu\n", fault->part, fault->detail,
            (unsigned long long)fault->where, (unsigned long long)fault->expected,
            (unsigned long long)fault->found);
    abort();
}

#endif
