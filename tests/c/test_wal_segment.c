/* Read WAL segments with any single bit flipped, cut at any byte, and with stale bytes after the
 * end. The reader returns a prefix of the written frames. It distinguishes a torn tail from damage
 * wherever that is possible. */
#include "check.h"
#include "core/core.h"

enum { GROUPS = 6, SEGMENTS = 3, FIRST_LSN = 1000, FIRST_GROUP = 65533, BYTES = 16384 };

/* One segment as it was written, and the positions of its groups. */
struct written {
    _Alignas(8) uint8_t bytes[BYTES];
    uint64_t used;                /* offset after the SEAL record, or after the last group */
    uint64_t groups[GROUPS + 1];  /* offset of each group; [GROUPS]: after the last group */
    uint64_t lsns[GROUPS + 1];    /* first LSN of each group; [GROUPS] is the next LSN after them */
    uint64_t first_group;
    uint32_t salt;
    bool sealed;
};

/* ---- making segments --------------------------------------------------------------------- */

static uint64_t frame_write(uint8_t *at, struct rng *r, uint64_t lsn)
{
    struct pg_frame_head *f = (struct pg_frame_head *)at;
    uint64_t words = rng_below(r, 12);

    *f = (struct pg_frame_head){.bytes = (uint32_t)(sizeof *f + 8 * words), .lsn = lsn,
                                .type = (uint16_t)(PG_WAL_SEAL + 1 + rng_below(r, 12))};
    for (uint64_t i = 0; i < words; i++)
        ((uint64_t *)(f + 1))[i] = rng_next(r) & rng_next(r);
    return f->bytes;
}

static void segment_write(struct written *s, struct rng *r, uint64_t lsn, uint64_t group, bool seal)
{
    struct pg_wal_segment header = {.magic = PG_WAL_SEGMENT_MAGIC, .uuid = {7}, .first_lsn = lsn,
                                    .first_group = group, .bytes = BYTES,
                                    .salt = (uint32_t)rng_next(r) | 1};
    uint64_t at = PG_WAL_SEGMENT_HEAD;

    *s = (struct written){.first_group = group, .salt = header.salt, .sealed = seal};
    pg_wal_segment_begin(s->bytes, &header);
    for (unsigned g = 0; g < GROUPS; g++) {
        struct pg_wal_group fields = {.number = group + g, .boot_ns = (int64_t)lsn, .wall_ns = 7};
        uint64_t end = at + PG_GROUP_HEAD;
        s->groups[g] = at;
        s->lsns[g] = lsn;
        for (uint64_t frames = 1 + rng_below(r, 6); frames > 0; frames--)
            end += frame_write(s->bytes + end, r, lsn++);
        pg_group_seal(s->bytes + at, end - at, s->salt, &fields);
        at = end;
    }
    s->groups[GROUPS] = at;
    s->lsns[GROUPS] = lsn;
    s->used = at;
    if (seal) {
        pg_wal_segment_end((struct pg_frame_head *)(s->bytes + at), s->salt, group + GROUPS - 1,
                           lsn - 1);
        s->used += sizeof(struct pg_frame_head);
    }
    CHECK(s->used + 512 < BYTES);
}

/* ---- reading segments ------------------------------------------------------------------------ */

/* Read a segment to its end and compare each frame with the written frame. Return the number of
 * groups. */
static unsigned walk_end(struct pg_walk *w, const struct written *s)
{
    const struct pg_frame_head *f;
    uint64_t lsn = s->lsns[0], at = s->groups[0];
    unsigned groups = 0;

    while ((f = pg_walk_next(w)) != NULL) {
        if (at == s->groups[groups]) {
            at += PG_GROUP_HEAD;
            groups++;
        }
        CHECK_EQUAL(f->lsn, lsn++);
        CHECK((const uint8_t *)f == w->bytes + at);
        CHECK(memcmp(f, s->bytes + at, f->bytes) == 0);
        at += f->bytes;
    }
    CHECK_EQUAL(w->at, s->groups[groups]);
    CHECK_EQUAL(w->lsn, s->lsns[groups] - 1);
    CHECK_EQUAL(w->group, s->first_group + groups - 1);
    CHECK(pg_walk_next(w) == NULL);
    return groups;
}

/* Read `size` modified bytes of a segment. Set *refused if the reader refuses its header. Return
 * the number of groups read. */
static unsigned walk_one(struct pg_walk *w, const struct written *s, const uint8_t *bytes,
                         uint64_t size, bool *refused)
{
    struct pg_fault why;
    /* The memory ends where the file ends, so the sanitizers report every access beyond it. */
    uint8_t *exact = malloc(size > 0 ? size : 1);
    unsigned groups = 0;

    CHECK(exact != NULL);
    memcpy(exact, bytes, size);
    *w = (struct pg_walk){0};
    *refused = !pg_walk_segment(w, exact, size, &why);
    CHECK(*refused == (why.part[0] != 0));
    if (!*refused)
        groups = walk_end(w, s);
    free(exact);
    return groups;
}

/* Return the index of the group that contains a byte; GROUPS = the byte is after the last group. */
static unsigned group_of(const struct written *s, uint64_t byte)
{
    unsigned g = 0;
    while (g < GROUPS && byte >= s->groups[g + 1])
        g++;
    return g;
}

/* Check the reader's result if only the group `bad` is damaged. */
static void bad_group_found(const struct pg_walk *w, const struct written *s, unsigned bad,
                            unsigned groups, uint64_t byte)
{
    bool newest = bad == GROUPS || (bad == GROUPS - 1 && !s->sealed);

    CHECK_EQUAL(groups, bad);
    if (newest) {
        CHECK_EQUAL(w->state, PG_WALK_TORN);
        return;
    }
    CHECK_EQUAL(w->state, PG_WALK_DAMAGED);
    CHECK_EQUAL(w->lost_from, s->lsns[bad]);
    CHECK_EQUAL(w->lost_to, s->lsns[bad + 1] - 1);
    CHECK(w->bad_from <= byte && byte < w->bad_to);
    CHECK_EQUAL(w->bad_to, s->groups[bad + 1]);
}

/* ---- tests ------------------------------------------------------------------------------- */

static void test_crc32c(void)
{
    static const struct {
        uint8_t first;
        int step;
        uint32_t crc;
    } vectors[] = {{0, 0, 0x8a9136aa}, {0xff, 0, 0x62a8ab43}, {0, 1, 0x46dd794e}, {31, -1, 0x113fdb5c}};
    struct rng r = {1};
    uint8_t bytes[300];

    for (unsigned v = 0; v < 4; v++) {               /* RFC 3720, appendix B.4: 32 bytes each */
        for (int i = 0; i < 32; i++)
            bytes[i] = (uint8_t)(vectors[v].first + vectors[v].step * i);
        CHECK_EQUAL(pg_crc32c(0, bytes, 32), vectors[v].crc);
        CHECK_EQUAL(crc32c_by_table(0, bytes, 32), vectors[v].crc);
    }
    CHECK_EQUAL(pg_crc32c(0, "123456789", 9), 0xe3069283);
    for (unsigned i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)rng_next(&r);
    for (unsigned from = 0; from < 9; from++)
        for (unsigned len = 0; len < sizeof bytes - 9; len++) {
            uint32_t half = pg_crc32c(0, bytes + from, len / 3);
            CHECK_EQUAL(pg_crc32c(0, bytes + from, len), crc32c_by_table(0, bytes + from, len));
            CHECK_EQUAL(pg_crc32c(half, bytes + from + len / 3, len - len / 3),
                        pg_crc32c(0, bytes + from, len));
        }
}

static void test_whole(void)
{
    struct written s;
    struct pg_walk w;
    struct rng r = {2};
    bool refused;

    segment_write(&s, &r, FIRST_LSN, FIRST_GROUP, false);
    CHECK_EQUAL(walk_one(&w, &s, s.bytes, BYTES, &refused), GROUPS);
    CHECK_EQUAL(w.state, PG_WALK_END);
    CHECK_EQUAL(w.boot_ns, s.lsns[GROUPS - 1]);
    segment_write(&s, &r, FIRST_LSN, FIRST_GROUP, true);
    CHECK_EQUAL(walk_one(&w, &s, s.bytes, BYTES, &refused), GROUPS);
    CHECK_EQUAL(w.state, PG_WALK_SEALED);
}

/* pg_walk_skip skips the damaged group `bad` only if the whole group precedes the records that are
 * still needed. */
static void skips_what_is_dead(const struct pg_walk *damaged, const struct written *s, unsigned bad)
{
    struct pg_walk w = *damaged;
    unsigned groups = bad + 1;

    CHECK(!pg_walk_skip(&w, s->lsns[bad + 1] - 1));
    CHECK_EQUAL(memcmp(&w, damaged, sizeof w), 0);
    CHECK(pg_walk_skip(&w, s->lsns[bad + 1]));
    CHECK_EQUAL(w.lsn, s->lsns[bad + 1] - 1);
    while (pg_walk_next(&w) != NULL)
        if (w.next == w.at)
            CHECK_EQUAL(w.lsn, s->lsns[++groups] - 1);
    CHECK_EQUAL(groups, GROUPS);
    CHECK_EQUAL(w.state, s->sealed ? PG_WALK_SEALED : PG_WALK_END);
    CHECK_EQUAL(w.group, FIRST_GROUP + GROUPS - 1);
    CHECK(!pg_walk_skip(&w, UINT64_MAX));
}

static void flip_every_bit(bool seal, uint64_t *tried)
{
    struct written s;
    struct pg_walk w;
    struct rng r = {3 + seal};
    bool refused;

    segment_write(&s, &r, FIRST_LSN, FIRST_GROUP, seal);
    for (uint64_t bit = 0; bit < 8 * (s.used + 64); bit++, ++*tried) {
        uint64_t byte = bit / 8;
        s.bytes[byte] ^= (uint8_t)(1u << bit % 8);
        unsigned groups = walk_one(&w, &s, s.bytes, BYTES, &refused);
        w.bytes = s.bytes;
        if (!refused && w.state == PG_WALK_DAMAGED)
            skips_what_is_dead(&w, &s, group_of(&s, byte));
        s.bytes[byte] ^= (uint8_t)(1u << bit % 8);
        CHECK_EQUAL(refused, byte < sizeof(struct pg_wal_segment));
        if (refused)
            continue;
        if (byte < PG_WAL_SEGMENT_HEAD || (s.sealed && byte >= s.used))
            CHECK_EQUAL(groups, GROUPS);
        else
            bad_group_found(&w, &s, group_of(&s, byte), groups, byte);
    }
}

static void test_every_bit(void)
{
    uint64_t tried = 0;

    flip_every_bit(false, &tried);
    flip_every_bit(true, &tried);
    printf("%" PRIu64 " single bits flipped\n", tried);
}

enum behind { NOTHING, ZEROS, STALE, BEHINDS };

/* Cut the file at offset `cut`. After the cut the file ends, or has zeros or the content of an
 * older file. */
static void cut_one(const struct written *s, const struct written *old, uint64_t cut,
                    enum behind behind)
{
    _Alignas(8) uint8_t bytes[BYTES] = {0};
    struct pg_walk w;
    bool refused;
    unsigned groups;

    memcpy(bytes, s->bytes, cut);
    if (behind == STALE)
        memcpy(bytes + cut, old->bytes + cut, BYTES - cut);
    groups = walk_one(&w, s, bytes, behind == NOTHING ? cut : BYTES, &refused);
    while (behind != NOTHING && cut < s->used && bytes[cut] == s->bytes[cut])
        cut++;                                       /* the byte written at the cut happens to
                                                        equal the original byte */
    CHECK_EQUAL(refused,
                cut < (behind == NOTHING ? PG_WAL_SEGMENT_HEAD : sizeof(struct pg_wal_segment)));
    if (refused)
        return;
    CHECK_EQUAL(groups, cut < s->groups[0] ? 0 : group_of(s, cut));
    CHECK_EQUAL(w.state == PG_WALK_SEALED, cut >= s->used);
    CHECK(w.state != PG_WALK_DAMAGED);
    CHECK(w.state == PG_WALK_END || behind == STALE || cut != s->groups[groups]);
}

static void test_every_cut(void)
{
    struct written s, old;
    struct rng r = {5};
    uint64_t tried = 0;

    segment_write(&old, &r, FIRST_LSN - 500, FIRST_GROUP - 100, true);
    segment_write(&s, &r, FIRST_LSN, FIRST_GROUP, true);
    for (uint64_t cut = 0; cut <= s.used; cut++)     /* a cut header gets no stale bytes, because
                                                        these would be the valid header of another
                                                        segment */
        for (enum behind b = NOTHING; b < (cut < PG_WAL_SEGMENT_HEAD ? STALE : BEHINDS); b++,
             tried++)
            cut_one(&s, &old, cut, b);
    printf("%" PRIu64 " cuts\n", tried);
}

/* A power cut leaves all earlier groups, and any subset of the newest group's sectors. */
static void test_torn_sectors(void)
{
    struct written s, torn;
    struct pg_walk w;
    struct rng r = {6};
    bool refused;

    for (unsigned round = 0; round < 2000; round++) {
        segment_write(&s, &r, FIRST_LSN, FIRST_GROUP, false);
        torn = s;
        for (uint64_t at = s.groups[GROUPS - 1]; at < s.used; at = at / 512 * 512 + 512)
            if (rng_below(&r, 2) == 0)
                memset(torn.bytes + at, 0, 512 - at % 512);
        bool same = memcmp(torn.bytes, s.bytes, BYTES) == 0;
        CHECK_EQUAL(walk_one(&w, &s, torn.bytes, BYTES, &refused), same ? GROUPS : GROUPS - 1);
        CHECK(w.state == PG_WALK_TORN || w.state == PG_WALK_END);
    }
}

static int next(struct pg_walk *w, const struct written *s, struct pg_fault *why)
{
    if (!pg_walk_segment(w, s->bytes, BYTES, why))
        return 0;
    walk_end(w, s);
    return 1;
}

static void test_lists(void)
{
    static struct written s[SEGMENTS];
    struct written other;
    struct pg_walk w = {0};
    struct pg_fault why;
    struct rng r = {7};
    uint64_t lsn = FIRST_LSN;

    for (unsigned i = 0; i < SEGMENTS; i++, lsn = s[i - 1].lsns[GROUPS])
        segment_write(&s[i], &r, lsn, FIRST_GROUP + i * GROUPS, i < SEGMENTS - 1);
    for (unsigned i = 0; i < SEGMENTS; i++)
        CHECK(next(&w, &s[i], &why));
    CHECK_EQUAL(w.state, PG_WALK_END);
    /* A missing segment is damage. */
    w = (struct pg_walk){0};
    CHECK(next(&w, &s[0], &why) && !next(&w, &s[2], &why));
    CHECK_EQUAL(w.state, PG_WALK_DAMAGED);
    CHECK_EQUAL(w.lost_from, s[1].lsns[0]);
    CHECK_EQUAL(w.lost_to, s[2].lsns[0] - 1);
    /* If another segment follows, a missing newest group is damage and not a torn tail. */
    other = s[0];
    memset(other.bytes + other.groups[GROUPS - 1], 0, BYTES - other.groups[GROUPS - 1]);
    w = (struct pg_walk){0};
    CHECK(next(&w, &other, &why));
    CHECK_EQUAL(w.state, PG_WALK_END);
    CHECK(!next(&w, &s[1], &why));
    CHECK_EQUAL(w.state, PG_WALK_DAMAGED);
    CHECK_EQUAL(w.lost_from, s[0].lsns[GROUPS - 1]);
    CHECK_EQUAL(w.lost_to, s[1].lsns[0] - 1);
    /* A lost SEAL is damage, but the lost range is empty. */
    other = s[0];
    other.bytes[other.groups[GROUPS]] ^= 1;
    w = (struct pg_walk){0};
    CHECK(next(&w, &other, &why) && !next(&w, &s[1], &why));
    CHECK_EQUAL(w.lost_to, w.lost_from - 1);
    /* A segment of another arena is refused. */
    other = s[1];
    ((struct pg_wal_segment *)other.bytes)->uuid[0] ^= 1;
    pg_wal_segment_begin(other.bytes, &(struct pg_wal_segment){
        .magic = PG_WAL_SEGMENT_MAGIC, .uuid = {8}, .first_lsn = s[1].lsns[0],
        .first_group = s[1].first_group, .salt = s[1].salt});
    w = (struct pg_walk){0};
    CHECK(next(&w, &s[0], &why) && !next(&w, &other, &why));
    CHECK_EQUAL(w.state, PG_WALK_SEALED);
}

/* Groups and frames with wrong lengths, whose checksums match these lengths. */
static void test_hostile_lengths(void)
{
    struct written s;
    struct pg_walk w;
    struct rng r = {8};
    bool refused;

    for (unsigned round = 0; round < 20000; round++) {
        segment_write(&s, &r, FIRST_LSN, FIRST_GROUP, false);
        uint64_t at = s.groups[rng_below(&r, GROUPS)];
        struct pg_frame_head *f = (struct pg_frame_head *)(s.bytes + at);
        struct pg_wal_group *g = (struct pg_wal_group *)(f + 1);
        uint64_t values[] = {0, 8, g->bytes - 8, g->bytes + 8, UINT64_MAX, UINT64_MAX - 63, BYTES};
        g->bytes = values[rng_below(&r, 7)];
        f->bytes = rng_below(&r, 4) == 0 ? (uint32_t)values[rng_below(&r, 7)] : f->bytes;
        if (f->bytes > sizeof *f && f->bytes < BYTES - at)
            f->crc = pg_crc32c(pg_crc32c(0, &f->bytes, 4), &f->lsn, f->bytes - 8);
        CHECK(walk_one(&w, &s, s.bytes, BYTES, &refused) < GROUPS);
        CHECK(w.state == PG_WALK_TORN || w.state == PG_WALK_DAMAGED);
    }
}

int main(void)
{
    RUN(test_crc32c);
    RUN(test_whole);
    RUN(test_every_bit);
    RUN(test_every_cut);
    RUN(test_torn_sectors);
    RUN(test_lists);
    RUN(test_hostile_lengths);
    return 0;
}
