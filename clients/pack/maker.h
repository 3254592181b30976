/* maker.h - objects of frozen dataclasses with slots, made without their slow __init__. */
#ifndef PURGATORYD_PACK_MAKER_H
#define PURGATORYD_PACK_MAKER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec maker_spec;    /* the type Maker */

#endif
