/* wal_segment.c - the format of WAL files: frames in groups, groups in WAL segments.
 *
 * The functions only read and write bytes in memory. A group is the set of frames that one commit
 * writes; it counts as a whole or not at all. Group n + 1 is written only after group n is on disk,
 * so a power cut can tear only the newest group. Invalid bytes are therefore a torn last group,
 * unless a frame of a later group follows. In that case the storage medium has lost data. Clients
 * do not know the salt, so no client can forge a frame inside a payload. */
#include "core/base/check.h"
#include "core/base/common.h"

/* ---- writing ---------------------------------------------------------------------------- */

static uint32_t frame_crc(const struct pg_frame_head *f)
{
    uint32_t crc = pg_crc32c(0, &f->bytes, sizeof f->bytes);
    return pg_crc32c(crc, &f->lsn, f->bytes - offsetof(struct pg_frame_head, lsn));
}

static void frame_seal(struct pg_frame_head *f, uint32_t salt, uint64_t group)
{
    f->salt = salt;
    f->group = (uint16_t)group;
    f->crc = frame_crc(f);
}

static uint32_t header_crc(const struct pg_wal_segment *h)
{
    return pg_crc32c(0, h, offsetof(struct pg_wal_segment, crc));
}

void pg_wal_segment_begin(void *block, const struct pg_wal_segment *fields)
{
    struct pg_wal_segment *h = memset(block, 0, PG_WAL_SEGMENT_HEAD);

    *h = *fields;
    h->major = PG_WAL_MAJOR;
    h->minor = PG_WAL_MINOR;
    h->crc = header_crc(h);
}

void pg_group_seal(void *group, uint64_t bytes, uint32_t salt, const struct pg_wal_group *fields)
{
    struct pg_frame_head *head = group;
    uint8_t *at = (uint8_t *)group + PG_GROUP_HEAD, *end = (uint8_t *)group + bytes;

    *head = (struct pg_frame_head){
        .bytes = PG_GROUP_HEAD, .lsn = ((struct pg_frame_head *)at)->lsn - 1, .type = PG_WAL_COMMIT_GROUP};
    *(struct pg_wal_group *)(head + 1) = *fields;
    ((struct pg_wal_group *)(head + 1))->bytes = bytes - PG_GROUP_HEAD;
    frame_seal(head, salt, fields->number);
    for (; at != end; at += head->bytes) {
        head = (struct pg_frame_head *)at;
        frame_seal(head, salt, fields->number);
    }
}

void pg_wal_segment_end(struct pg_frame_head *seal, uint32_t salt, uint64_t group, uint64_t lsn)
{
    *seal = (struct pg_frame_head){.bytes = sizeof *seal, .lsn = lsn, .type = PG_WAL_SEAL};
    frame_seal(seal, salt, group + 1);               /* a SEAL has the number of the next group */
}

/* ---- one frame, one group ------------------------------------------------------------------ */

/* Return the frame at offset `at` if it ends at or before `end`, has this file's salt and has a
 * correct checksum. Otherwise return NULL. */
static const struct pg_frame_head *frame_at(const struct pg_walk *w, uint64_t at, uint64_t end)
{
    const struct pg_frame_head *f = (const void *)(w->bytes + at);

    if (end - at < sizeof *f || f->salt != w->header.salt)
        return NULL;
    if (f->bytes < sizeof *f || f->bytes % 8 != 0 || f->bytes > PG_WAL_FRAME_MAX ||
        f->bytes > end - at)
        return NULL;
    return f->crc == frame_crc(f) ? f : NULL;
}

static bool is_record(const struct pg_frame_head *f)
{
    return f->type > PG_WAL_SEAL && f->type < PG_WAL_TYPES;
}

/* Return the body of the GROUP frame at w->at if this frame begins the next group. Otherwise return
 * NULL. */
static const struct pg_wal_group *next_group(const struct pg_walk *w)
{
    const struct pg_frame_head *f = frame_at(w, w->at, w->size);
    const struct pg_wal_group *g;

    if (!f || f->type != PG_WAL_COMMIT_GROUP || f->bytes != PG_GROUP_HEAD || f->lsn != w->lsn)
        return NULL;
    g = (const void *)(f + 1);
    if (g->number != w->group + 1 || g->bytes == 0)
        return NULL;
    return g->bytes <= w->size - w->at - PG_GROUP_HEAD ? g : NULL;
}

/* Check that all frames of the group are present. Set *bad to the offset of the first invalid
 * frame, or to the group's end, and *lsn to the LSN of the last valid frame. */
static bool is_whole(const struct pg_walk *w, const struct pg_wal_group *g, uint64_t *bad,
                     uint64_t *lsn)
{
    uint64_t end = w->at + PG_GROUP_HEAD + g->bytes;
    const struct pg_frame_head *f;

    for (*bad = w->at + PG_GROUP_HEAD, *lsn = w->lsn; *bad != end; *bad += f->bytes) {
        f = frame_at(w, *bad, end);
        if (!f || !is_record(f) || f->lsn != *lsn + 1 || f->group != (uint16_t)g->number)
            return false;
        *lsn = f->lsn;
    }
    return true;
}

static bool is_sealed(const struct pg_walk *w)
{
    const struct pg_frame_head *f = frame_at(w, w->at, w->size);
    return f && f->type == PG_WAL_SEAL && f->lsn == w->lsn && f->group == (uint16_t)(w->group + 1);
}

/* ---- after the last whole group -------------------------------------------------------------- */

static bool is_of_later_group(const struct pg_walk *w, const struct pg_frame_head *f)
{
    uint16_t ahead = (uint16_t)(f->group - (uint16_t)(w->group + 1));
    return ahead != 0 && ahead < 1u << 15;
}

static void damaged(struct pg_walk *w, uint64_t bad_to, uint64_t next_lsn)
{
    w->state = PG_WALK_DAMAGED;
    w->bad_to = bad_to;
    w->lost_to = next_lsn - 1;
}

/* No whole group begins at w->at. Decide whether the WAL ends there, a group is torn or data is
 * damaged. */
static void look_behind(struct pg_walk *w)
{
    const struct pg_frame_head *f;
    uint64_t word;

    w->state = PG_WALK_END;
    for (uint64_t at = w->at; at < w->size; at += sizeof word) {
        word = 0;
        memcpy(&word, w->bytes + at, w->size - at < sizeof word ? w->size - at : sizeof word);
        if (LIKELY(word == 0))
            continue;
        w->state = PG_WALK_TORN;
        w->bad_to = at + sizeof word;
        f = frame_at(w, at, w->size);
        if (f && is_of_later_group(w, f)) {
            damaged(w, at, is_record(f) ? f->lsn : f->lsn + 1);
            return;
        }
    }
}

/* ---- walking ------------------------------------------------------------------------------- */

static bool refused(struct pg_fault *why, const char *detail, uint64_t where, uint64_t expected,
                    uint64_t found)
{
    return fault_set(why, "wal", detail, where, expected, found);
}

static bool header_is_sound(const struct pg_wal_segment *h, struct pg_fault *why)
{
    if (h->magic != PG_WAL_SEGMENT_MAGIC && h->magic != PG_SNAPSHOT_MAGIC)
        return refused(why, "magic of a WAL segment", 0, PG_WAL_SEGMENT_MAGIC, h->magic);
    if (h->crc != header_crc(h))
        return refused(why, "checksum of a WAL segment's header",
                       offsetof(struct pg_wal_segment, crc), header_crc(h), h->crc);
    if (h->major != PG_WAL_MAJOR)
        return refused(why, "version of a WAL segment", offsetof(struct pg_wal_segment, major),
                       PG_WAL_MAJOR, h->major);
    if (h->minor > PG_WAL_MINOR)
        return refused(why, "minor version of a WAL segment",
                       offsetof(struct pg_wal_segment, minor), PG_WAL_MINOR, h->minor);
    return true;
}

/* Check that a segment is the successor of the segment that was read last. */
static bool follows(struct pg_walk *w, const struct pg_wal_segment *h, struct pg_fault *why)
{
    if (h->magic != w->header.magic)
        return refused(why, "magic of a WAL segment", 0, w->header.magic, h->magic);
    if (memcmp(h->uuid, w->header.uuid, sizeof h->uuid) != 0)
        return refused(why, "the WAL segment belongs to another arena: first LSN", 0, w->lsn + 1,
                       h->first_lsn);
    if (h->first_lsn == w->lsn + 1 && h->first_group == w->group + 1 &&
        w->state == PG_WALK_SEALED)
        return true;
    damaged(w, w->size, h->first_lsn);
    return refused(why, "a WAL segment ends before the next one begins: LSN", w->bad_from,
                   h->first_lsn, w->lsn + 1);
}

int pg_walk_segment(struct pg_walk *w, const void *bytes, uint64_t size, struct pg_fault *why)
{
    struct pg_wal_segment h;

    *why = (struct pg_fault){0};
    if (size < PG_WAL_SEGMENT_HEAD || (uintptr_t)bytes % 8 != 0)
        return refused(why, "bytes of a WAL segment", 0, PG_WAL_SEGMENT_HEAD, size);
    memcpy(&h, bytes, sizeof h);
    if (!header_is_sound(&h, why) || (w->bytes && !follows(w, &h, why)))
        return 0;
    *w = (struct pg_walk){.header = h, .bytes = bytes, .size = size, .state = PG_WALK_GROUPS,
                          .at = PG_WAL_SEGMENT_HEAD, .next = PG_WAL_SEGMENT_HEAD,
                          .lsn = h.magic == PG_SNAPSHOT_MAGIC ? 0 : h.first_lsn - 1,
                          .group = h.first_group - 1,
                          .boot_ns = h.boot_ns, .wall_ns = h.wall_ns};
    return 1;
}

/* Enter the next group, or set w->state to the reason why there is no next group. */
static bool enter_group(struct pg_walk *w)
{
    const struct pg_wal_group *g = next_group(w);
    uint64_t lsn;

    w->bad_from = w->at;
    w->lost_from = w->lsn + 1;
    if (!g || !is_whole(w, g, &w->bad_from, &lsn)) {
        if (is_sealed(w))
            w->state = PG_WALK_SEALED;
        else
            look_behind(w);
        return false;
    }
    w->next = w->at + PG_GROUP_HEAD;
    w->at = w->bad_from;
    w->lsn = lsn;
    w->group = g->number;
    w->boot_ns = g->boot_ns;
    w->wall_ns = g->wall_ns;
    return true;
}

const struct pg_frame_head *pg_walk_next(struct pg_walk *w)
{
    const struct pg_frame_head *f;

    if (w->next == w->at && (w->state != PG_WALK_GROUPS || !enter_group(w)))
        return NULL;
    f = (const void *)(w->bytes + w->next);
    w->next += f->bytes;
    return f;
}

/* Number of the group that precedes a GROUP or SEAL frame. */
static uint64_t group_before(const struct pg_walk *w, const struct pg_frame_head *f)
{
    if (f->type == PG_WAL_COMMIT_GROUP)
        return ((const struct pg_wal_group *)(f + 1))->number - 1;
    return w->group + (uint16_t)(f->group - 1 - (uint16_t)w->group);
}

static bool begins_later_group(const struct pg_walk *w, const struct pg_frame_head *f)
{
    return f != NULL && is_of_later_group(w, f) && f->lsn >= w->lsn &&
           ((f->type == PG_WAL_COMMIT_GROUP && f->bytes == PG_GROUP_HEAD) || f->type == PG_WAL_SEAL);
}

int pg_walk_skip(struct pg_walk *w, uint64_t live_lsn)
{
    const struct pg_frame_head *f = NULL;
    uint64_t at = w->bad_to;

    if (w->state != PG_WALK_DAMAGED)
        return 0;
    for (; at < w->size; at += 8) {
        f = frame_at(w, at, w->size);
        if (begins_later_group(w, f))
            break;
    }
    if (at >= w->size || f->lsn >= live_lsn)
        return 0;
    w->group = group_before(w, f);
    w->lsn = f->lsn;
    w->at = w->next = at;
    w->state = PG_WALK_GROUPS;
    return 1;
}
