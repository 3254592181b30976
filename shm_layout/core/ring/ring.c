/* ring.c - a ring of bytes in memory that two processes share (ring.h).
 *
 * A side that has nothing to do announces that it sleeps, and looks once more; the other side stores
 * its position, and looks whether somebody sleeps. Both have a full barrier between the store and
 * the look, so at least one of them sees the other's store, and no wake-up is lost. */

#include "core/base/check.h"
#include "core/ring/ring.h"

void pg_ring_open(struct pg_ring_end *end, struct pg_ring *words, void *bytes, uint64_t size)
{
    *end = (struct pg_ring_end){.words = words, .bytes = bytes, .size = size};
}

static void copy_in(const struct pg_ring_end *end, uint64_t at, const void *from, uint64_t bytes)
{
    const uint64_t offset = at & (end->size - 1), to_end = end->size - offset;
    const uint64_t first = least(bytes, to_end);
    memcpy(end->bytes + offset, from, first);
    memcpy(end->bytes, (const uint8_t *)from + first, bytes - first);
}

static void copy_out(const struct pg_ring_end *end, uint64_t at, void *to, uint64_t bytes)
{
    const uint64_t offset = at & (end->size - 1), to_end = end->size - offset;
    const uint64_t first = least(bytes, to_end);
    memcpy(to, end->bytes + offset, first);
    memcpy((uint8_t *)to + first, end->bytes, bytes - first);
}

/* Note the position of the other side, which was read once. It is sound if the ring then has `used`
 * bytes, at most its size, and whole units. */
static bool position_sound(struct pg_ring_end *end, uint64_t other, uint64_t used)
{
    if (UNLIKELY(used > end->size || used % PG_RING_UNIT != 0))
        end->broken = true;
    else
        end->other = other;
    return !end->broken;
}

/* ---- put ---------------------------------------------------------------------------------- */

/* Return the number of free bytes. The acquire orders the taker's reads before our writes. */
static uint64_t space(struct pg_ring_end *end)
{
    const uint64_t head = LOAD_ACQUIRE(&end->words->head);
    return position_sound(end, head, end->own - head) ? end->size - (end->own - head) : 0;
}

static bool has_space(struct pg_ring_end *end, uint64_t bytes)
{
    return end->size - (end->own - end->other) >= bytes || space(end) >= bytes;
}

static void put_publish(struct pg_ring_end *end, uint64_t bytes)
{
    end->own += bytes;
    STORE_RELEASE(&end->words->tail, end->own);
}

/* Put the length of a message that is larger than the ring; its pieces follow. */
static bool large_begin(struct pg_ring_end *end, uint64_t bytes)
{
    if (!has_space(end, RING_WORD))
        return false;
    copy_in(end, end->own, &bytes, RING_WORD);
    end->length = bytes;
    end->done = 0;
    put_publish(end, RING_WORD);
    return true;
}

static bool large_put(struct pg_ring_end *end, const uint8_t *message, uint64_t bytes)
{
    if (end->length == 0 && !large_begin(end, bytes))
        return false;
    uint64_t free_bytes;
    while (end->done < padded(bytes) && (free_bytes = space(end)) != 0) {
        const uint64_t piece = least(padded(bytes) - end->done, free_bytes);
        copy_in(end, end->own, message + end->done, least(piece, bytes - end->done));
        end->done += piece;
        put_publish(end, piece);
    }
    if (end->done < padded(bytes))
        return false;
    end->length = 0;
    return true;
}

int pg_ring_put(struct pg_ring_end *end, const void *message, uint64_t bytes)
{
    const uint64_t needed = RING_WORD + padded(bytes);
    if (UNLIKELY(needed > end->size)) {
        end->wanted = large_put(end, message, bytes) ? 0 : PG_RING_UNIT;
        return end->wanted == 0;
    }
    end->wanted = has_space(end, needed) ? 0 : needed;
    if (end->wanted != 0)
        return false;
    copy_in(end, end->own, &bytes, RING_WORD);
    copy_in(end, end->own + RING_WORD, message, bytes);
    put_publish(end, needed);
    return true;
}

/* ---- take --------------------------------------------------------------------------------- */

/* Return the number of bytes in the ring. The acquire orders the putter's writes before our
 * reads. */
static uint64_t used(struct pg_ring_end *end)
{
    const uint64_t tail = LOAD_ACQUIRE(&end->words->tail);
    return position_sound(end, tail, tail - end->own) ? tail - end->own : 0;
}

static bool has_bytes(struct pg_ring_end *end, uint64_t bytes)
{
    return end->other - end->own >= bytes || used(end) >= bytes;
}

static void take_publish(struct pg_ring_end *end, uint64_t bytes)
{
    end->own += bytes;
    STORE_RELEASE(&end->words->head, end->own);
}

/* Read the length of the next message once. It stays in the ring until the message is taken, unless
 * the message is larger than the ring. */
static bool length_read(struct pg_ring_end *end)
{
    if (!has_bytes(end, RING_WORD))
        return false;
    copy_out(end, end->own, &end->length, RING_WORD);
    end->done = 0;
    if (UNLIKELY(end->length == 0 || end->length > PG_MESSAGE_MAX)) {
        end->length = 0;
        end->broken = true;
        return false;
    }
    if (is_large(end, end->length))
        take_publish(end, RING_WORD);
    return true;
}

uint64_t pg_ring_next(struct pg_ring_end *end)
{
    if (end->broken || (end->length == 0 && !length_read(end)))
        return 0;
    const uint64_t whole = RING_WORD + padded(end->length);
    return has_bytes(end, whole > end->size ? PG_RING_UNIT : whole) ? end->length : 0;
}

static bool large_take(struct pg_ring_end *end, uint8_t *out)
{
    uint64_t there;
    while (end->done < padded(end->length) && (there = used(end)) != 0) {
        const uint64_t piece = least(padded(end->length) - end->done, there);
        copy_out(end, end->own, out + end->done, least(piece, end->length - end->done));
        end->done += piece;
        take_publish(end, piece);
    }
    if (end->done < padded(end->length))
        return false;
    end->length = 0;
    return true;
}

int pg_ring_take(struct pg_ring_end *end, void *out)
{
    PG_ASSERT(end->length != 0, "ring", "a message is taken after its length was read");
    const uint64_t whole = RING_WORD + padded(end->length);
    if (UNLIKELY(whole > end->size))
        return large_take(end, out);
    copy_out(end, end->own + RING_WORD, out, end->length);
    end->length = 0;
    take_publish(end, whole);
    return true;
}

void pg_ring_peek(const struct pg_ring_end *end, void *out, uint64_t bytes)
{
    PG_ASSERT(bytes <= end->length && RING_WORD + padded(end->length) <= end->size, "ring",
              "the bytes of a message that are read are in the ring");
    copy_out(end, end->own + RING_WORD, out, bytes);
}

/* ---- sleep and wake ------------------------------------------------------------------------ */

static bool may_take(struct pg_ring_end *end) { return pg_ring_next(end) != 0 || end->broken; }

/* A message that is larger than the ring waits for any space, another one for all of its bytes. A
 * putter that has not tried to put its message waits for half a ring. */
static bool may_put(struct pg_ring_end *end)
{
    return has_space(end, end->wanted != 0 ? end->wanted : end->size / 2) || end->broken;
}

static int sleep_unless(struct pg_ring_end *end, uint32_t *word, uint32_t how,
                        bool (*ready)(struct pg_ring_end *))
{
    EXCHANGE_RELAXED(word, how);
    FULL_BARRIER();
    if (!ready(end))
        return true;
    EXCHANGE_RELAXED(word, PG_RING_AWAKE);
    return false;
}

int pg_ring_sleep_taker(struct pg_ring_end *end, uint32_t how)
{
    return sleep_unless(end, &end->words->taker_sleeps, how, may_take);
}

int pg_ring_sleep_putter(struct pg_ring_end *end, uint32_t how)
{
    return sleep_unless(end, &end->words->putter_sleeps, how, may_put);
}

/* A thread that recalls the end stores `recalled` before it looks whether the taker sleeps, as a
 * putter stores `tail`. */
int pg_ring_sleep_unless_recalled(struct pg_ring_end *end)
{
    if (!pg_ring_sleep_taker(end, PG_RING_FUTEX))
        return false;
    if (LOAD_RELAXED(&end->recalled) == 0)
        return true;
    EXCHANGE_RELAXED(&end->words->taker_sleeps, PG_RING_AWAKE);
    return false;
}

uint32_t pg_ring_recall(struct pg_ring_end *end)
{
    STORE_RELAXED(&end->recalled, 1);
    return pg_ring_rouse_taker(end);
}

uint32_t pg_ring_rouse_taker(struct pg_ring_end *end)
{
    FULL_BARRIER();
    if (LIKELY(LOAD_RELAXED(&end->words->taker_sleeps) == PG_RING_AWAKE))
        return PG_RING_AWAKE;
    return EXCHANGE_RELAXED(&end->words->taker_sleeps, PG_RING_AWAKE);
}

uint32_t pg_ring_rouse_putter(struct pg_ring_end *end)
{
    FULL_BARRIER();
    if (LIKELY(LOAD_RELAXED(&end->words->putter_sleeps) == PG_RING_AWAKE))
        return PG_RING_AWAKE;
    return EXCHANGE_RELAXED(&end->words->putter_sleeps, PG_RING_AWAKE);
}
