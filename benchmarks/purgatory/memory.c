/* memory.c - memory functions that count allocated bytes, and the binary heap. */
#include <malloc.h>
#include <stdio.h>

#include "baseline.h"

void *allocate(struct baseline *b, size_t bytes)
{
    void *memory = malloc(bytes);
    if (memory == NULL) {
        fprintf(stderr, "baseline: out of memory\n");
        abort();
    }
    b->figures.bytes += malloc_usable_size(memory);
    if (b->figures.bytes > b->figures.bytes_max)
        b->figures.bytes_max = b->figures.bytes;
    return memory;
}

void release(struct baseline *b, void *memory)
{
    b->figures.bytes -= malloc_usable_size(memory);
    free(memory);
}

static void heap_grow(struct baseline *b, struct heap *h)
{
    const uint64_t capacity = h->capacity ? 2 * h->capacity : 1024;
    struct heap_entry *entries = allocate(b, capacity * sizeof *entries);
    if (h->capacity != 0) {
        memcpy(entries, h->entries, h->count * sizeof *entries);
        release(b, h->entries);
    }
    h->entries = entries;
    h->capacity = capacity;
}

void heap_push(struct baseline *b, struct heap *h, int64_t expires_ns, void *item)
{
    if (h->count == h->capacity)
        heap_grow(b, h);
    uint64_t at = h->count++;
    for (; at > 0 && h->entries[(at - 1) / 2].expires_ns > expires_ns; at = (at - 1) / 2)
        h->entries[at] = h->entries[(at - 1) / 2];
    h->entries[at] = (struct heap_entry){expires_ns, item};
}

static void sink(struct heap *h, uint64_t at)
{
    const struct heap_entry moving = h->entries[at];
    for (uint64_t child; (child = 2 * at + 1) < h->count; at = child) {
        if (child + 1 < h->count &&
            h->entries[child + 1].expires_ns < h->entries[child].expires_ns)
            child++;
        if (h->entries[child].expires_ns >= moving.expires_ns)
            break;
        h->entries[at] = h->entries[child];
    }
    h->entries[at] = moving;
}

void heap_pop(struct heap *h)
{
    h->entries[0] = h->entries[--h->count];
    if (h->count > 1)
        sink(h, 0);
}

void heap_order(struct heap *h)
{
    for (uint64_t at = h->count / 2; at-- > 0;)
        sink(h, at);
}
