/* fuzz.h - shared by the fuzz targets: functions that take bytes from the input, and the sizes of a
 * small arena.
 *
 * A target interprets its input as a program. It takes bytes from the front, and reads zeros after
 * the end of the input. Every input is therefore valid, and a shortened input runs the first part
 * of the program. */
#ifndef PURGATORYD_FUZZ_H
#define PURGATORYD_FUZZ_H

#include <stdio.h>
#include <stdlib.h>

#include "core/core.h"

/* Run one input. libFuzzer calls this; tests/fuzz/main.c calls it for every file of the corpus. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FUZZ_LAYOUT = 4711, FUZZ_TICK_NS = 1000000, FUZZ_SESSIONS = 2 };

/* A configuration so small that a short input fills every table and wraps every ring. */
static const struct pg_config fuzz_config = {
    .layout_id = FUZZ_LAYOUT, .payload_bytes = 8192, .replay_bytes_max = 4096,
    .tick_ns = FUZZ_TICK_NS, .stream_id = 1, .secret = {1, 2}, .capacity = 12,
    .replay_capacity = 16, .fanout = 3, .namespaces = 2, .topics = 3,
    .sessions = FUZZ_SESSIONS, .clock_kind = PG_CLOCK_VIRTUAL, .watches = 24, .watermarks = 8,
    .watermark_ttl_ns = 1000000000, .groups = 3, .jobs = 16, .inbox_max = 6};

struct input {
    const uint8_t *at, *end;
};

/* Take bytes from the input; after its end, take zeros. */
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

/* Allocate zeroed pages, so that the sanitizers report an access beyond them. */
static inline void *fuzz_memory(uint64_t bytes)
{
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (memory == NULL)
        abort();
    return memset(memory, 0, bytes);
}

/* Print the fault and abort, unless `good` is true. */
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
