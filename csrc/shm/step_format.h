/*
 * The form of a step: a tag and what belongs to it for each value, and the tables that both ends keep
 * in step. Only objects of exactly the types named here are written. All others stand in a list that
 * is pickled, and the step has their places in it.
 */
#ifndef VLLM_COMMEXT_SHM_STEP_FORMAT_H
#define VLLM_COMMEXT_SHM_STEP_FORMAT_H

#include "limited_api.h" /* Python's headers come first */

#include <stdint.h>
#include <string.h>

#define STEP_FORMAT 2
#define STEP_MARK 's'
#define STEP_MAX_KINDS 8
#define STEP_MAX_FIELDS 64
#define STEP_MAX_SLOTS 8
#define STEP_IN_USE "this end of the steps is in use by another thread or by an interrupted call"
#define STEP_NO_SLOT 255
#define STEP_MAX_DEPTH 12
#define STEP_EPOCH_STEPS 4096
#define STEP_MAX_NAMES 16384  /* of an epoch; most of them belong to requests that have long ended */
#define STEP_MAX_REPEATS 65536
#define STEP_MAX_CONTAINERS 100000 /* of a step; a small object may hold one list very often */

enum step_tag {
    STEP_NONE, STEP_TRUE, STEP_FALSE,
    STEP_INT8, STEP_INT32, STEP_INT64, STEP_FLOAT,
    STEP_TEXT,       /* uint32 bytes, UTF-8 with surrogates */
    STEP_KNOWN,      /* int32 number of a name */
    STEP_NAME,       /* the same, of a name that may be new: see step_names */
    STEP_LIST, STEP_TUPLE, STEP_SET, /* uint32 count, the values */
    STEP_DICT,       /* uint32 count, keys and values in turns */
    STEP_INTS,       /* a list of int32: uint32 count, the numbers */
    STEP_REPEATED,   /* a list of one int32 over and over: uint32 count, the number */
    STEP_SINGLES,    /* a list of lists of one int32: uint32 count, the numbers */
    STEP_NAMES,      /* a list of names: uint32 count, the numbers; behind that of a name which the
                        reader does not have yet, which is the next one, a text */
    STEP_SAME_NAMES, /* those of the last time in this slot */
    STEP_REPLACED_NAMES, /* the same but for some places, and as many as there are now: uint32
                            count, uint32 places, the places, the names there and at the end */
    STEP_REMOVED_NAMES,  /* the same without some, and with others at the end: uint32 count, uint32
                            removed, their places in rising order, the names at the end */
    STEP_NAMED,      /* a dict: names in one of these ways, a list of its values */
    STEP_OBJECT,     /* uint8 kind, the values of its fields in their order */
    STEP_CONSTANT,   /* uint8 place among the constants */
    STEP_OTHER,      /* the next one of the pickled list */
};

/* A step without names can be understood alone, and has epoch 0. */
struct step_header {
    char mark;
    uint32_t fingerprint, epoch, number, body_bytes;
} __attribute__((packed));

/* A class whose objects go field by field. Those with a slot hold names of requests. */
struct step_kind {
    PyObject *type, *fields;
    Py_ssize_t n_fields;
    unsigned char slots[STEP_MAX_FIELDS];
};

/* What both ends are made from. */
struct step_schema {
    struct step_kind kinds[STEP_MAX_KINDS];
    Py_ssize_t n_kinds;
    PyObject *constants; /* tuple */
    uint32_t fingerprint;
};

/* Put an owned reference in the place of another. */
static inline void step_replace(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    *place = object;
    Py_XDECREF(before);
}

static int step_read_kind(struct step_kind *kind, PyObject *item) {
    PyObject *type, *fields; /* not in their places before they are owned: a failure clears those */
    PyObject *given;
    if (!PyArg_ParseTuple(item, "O!O!S", &PyType_Type, &type, &PyTuple_Type, &fields, &given))
        return -1;
    const char *slots = PyBytes_AsString(given);
    Py_ssize_t n_slots = PyBytes_Size(given);
    Py_INCREF(type);
    Py_INCREF(fields);
    kind->type = type;
    kind->fields = fields;
    kind->n_fields = PyTuple_Size(fields);
    if (kind->n_fields > STEP_MAX_FIELDS || n_slots != kind->n_fields) {
        PyErr_Format(PyExc_ValueError, "expected up to %d fields and as many slots, got %zd and %zd",
                     STEP_MAX_FIELDS, kind->n_fields, n_slots);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n_slots; i++) {
        kind->slots[i] = (unsigned char)slots[i];
        if (kind->slots[i] < STEP_MAX_SLOTS || kind->slots[i] == STEP_NO_SLOT) continue;
        PyErr_Format(PyExc_ValueError, "expected slots below %d", STEP_MAX_SLOTS);
        return -1;
    }
    return 0;
}

static int step_read_schema(struct step_schema *schema, PyObject *kinds) {
    Py_ssize_t count = PyTuple_Size(kinds);
    if (count > STEP_MAX_KINDS) {
        PyErr_Format(PyExc_ValueError, "expected up to %d classes, got %zd", STEP_MAX_KINDS, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        schema->n_kinds++;
        if (step_read_kind(&schema->kinds[i], PyTuple_GetItem(kinds, i)) < 0) return -1;
    }
    return 0;
}

static void step_clear_schema(struct step_schema *schema) {
    for (Py_ssize_t i = 0; i < schema->n_kinds; i++) {
        Py_CLEAR(schema->kinds[i].type);
        Py_CLEAR(schema->kinds[i].fields);
    }
    Py_CLEAR(schema->constants);
}

#endif
