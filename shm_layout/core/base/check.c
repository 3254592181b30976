/* check.c - report a broken invariant. */

#include "core/base/check.h"
#include "core/base/common.h"

#include <stdio.h>
#include <stdlib.h>

bool fault_set(struct pg_fault *fault, const char *part, const char *detail, uint64_t where,
               uint64_t expected, uint64_t found)
{
    if (fault->part[0] != 0)
        return false;
    strncpy(fault->part, part, sizeof fault->part - 1);
    strncpy(fault->detail, detail, sizeof fault->detail - 1);
    fault->where = where;
    fault->expected = expected;
    fault->found = found;
    return false;
}

void assertion_failed(const char *part, const char *invariant)
{
    fprintf(stderr, "purgatoryd: %s: %s: this is a fault of the program\n", part, invariant);
    abort();
}
