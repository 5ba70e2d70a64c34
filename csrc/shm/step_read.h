/*
 * A reader's side of steps: what it keeps, bytes and names. What is read was written on this host by a
 * process that may read our memory anyway; still nothing is trusted: each count is compared with the
 * bytes that are left, each place with what is there.
 */
#ifndef VLLM_COMMEXT_SHM_STEP_READ_H
#define VLLM_COMMEXT_SHM_STEP_READ_H

#include "step_format.h"

/* What a reader keeps of a slot: the names, and the last dict by these names whose values were int32,
 * because copying and changing a dict is faster than making it. */
struct unpack_slot {
    PyObject *names, *dict;
    int32_t *values;
    Py_ssize_t n_values, room; /* n_values: of the dict, which are those of the first names */
};

typedef struct {
    PyObject_HEAD
    struct step_schema schema;
    PyObject *names;  /* list: each name at its number */
    PyObject *error;  /* what is raised */
    PyObject *others; /* of the step that is being unpacked; NULL: nobody wants the step's values */
    Py_ssize_t next_other;
    struct unpack_slot slots[STEP_MAX_SLOTS];
    const char *at, *end;
    uint32_t epoch, number;
    int in_use;
} Unpacker;

static int unpack_fail(Unpacker *self, const char *what) {
    PyErr_Format(self->error, "a step is damaged: %s", what);
    return -1;
}

/* The next bytes; NULL with an exception set if there are not so many. */
static const char *unpack_bytes(Unpacker *self, size_t bytes) {
    if ((size_t)(self->end - self->at) < bytes) return unpack_fail(self, "it is too short"), NULL;
    const char *at = self->at;
    self->at += bytes;
    return at;
}

static int unpack_int32(Unpacker *self, int32_t *number) {
    const char *at = unpack_bytes(self, sizeof *number);
    if (at == NULL) return -1;
    memcpy(number, at, sizeof *number);
    return 0;
}

/* A count of items that take at least so many bytes each; -1 with an exception set. */
static Py_ssize_t unpack_count(Unpacker *self, size_t item_bytes) {
    uint32_t count;
    const char *at = unpack_bytes(self, sizeof count);
    if (at == NULL) return -1;
    memcpy(&count, at, sizeof count);
    if (count <= (size_t)(self->end - self->at) / item_bytes) return (Py_ssize_t)count;
    return unpack_fail(self, "it has more items than bytes");
}

static PyObject *unpack_text(Unpacker *self) {
    Py_ssize_t bytes = unpack_count(self, 1);
    if (bytes < 0) return NULL;
    return PyUnicode_DecodeUTF8(unpack_bytes(self, (size_t)bytes), bytes, "surrogatepass");
}

/* ---- names ---- */

/* A name by its number, borrowed; a new one follows it if `may_be_new`. */
static PyObject *unpack_name(Unpacker *self, int may_be_new) {
    int32_t number;
    if (unpack_int32(self, &number) < 0) return NULL;
    if (may_be_new && number == PyList_Size(self->names)) {
        PyObject *name = unpack_text(self);
        int failed = name == NULL || PyList_Append(self->names, name) < 0;
        Py_XDECREF(name);
        if (failed) return NULL;
    }
    if (number < 0 || number >= PyList_Size(self->names))
        return unpack_fail(self, "a name has no such number"), NULL;
    return PyList_GetItem(self->names, number);
}

static void unpack_forget_dict(struct unpack_slot *kept) {
    Py_CLEAR(kept->dict);
    kept->n_values = 0;
}

static void unpack_forget_slot(struct unpack_slot *kept) {
    unpack_forget_dict(kept);
    Py_CLEAR(kept->names);
    PyMem_Free(kept->values);
    kept->values = NULL;
    kept->room = 0;
}

/* Append so many names that follow. */
static int unpack_more_names(Unpacker *self, PyObject *names, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = unpack_name(self, 1);
        if (name == NULL || PyList_Append(names, name) < 0) return -1;
    }
    return 0;
}

/* The length that an edit leads to; -1 with an exception set if it cannot. `places`: where they are,
 * and how many. */
static Py_ssize_t unpack_edit(Unpacker *self, const struct unpack_slot *kept, const char **places,
                              Py_ssize_t *n_places) {
    uint32_t count;
    const char *at = unpack_bytes(self, sizeof count);
    if (at == NULL || (*n_places = unpack_count(self, sizeof(int32_t))) < 0) return -1;
    memcpy(&count, at, sizeof count);
    *places = unpack_bytes(self, (size_t)*n_places * sizeof(int32_t));
    if (kept->names == NULL) return unpack_fail(self, "it has no names before");
    return (Py_ssize_t)count;
}

static int32_t unpack_place(const char *places, Py_ssize_t number) {
    int32_t place;
    memcpy(&place, places + number * (Py_ssize_t)sizeof place, sizeof place);
    return place;
}

static int unpack_replaced(Unpacker *self, struct unpack_slot *kept) {
    const char *places;
    Py_ssize_t n_places, count = unpack_edit(self, kept, &places, &n_places);
    if (count < 0) return -1;
    unpack_forget_dict(kept);
    Py_ssize_t old = PyList_Size(kept->names);
    for (Py_ssize_t i = 0; i < n_places; i++) {
        int32_t place = unpack_place(places, i);
        PyObject *name = unpack_name(self, 1);
        if (name == NULL) return -1;
        if (place < 0 || place >= old) return unpack_fail(self, "a name has no such place");
        Py_INCREF(name);
        if (PyList_SetItem(kept->names, place, name) < 0) return -1;
    }
    if (count < old) return PyList_SetSlice(kept->names, count, old, NULL);
    return unpack_more_names(self, kept->names, count - old);
}

/* Take one name out, and its value. */
static int unpack_remove(struct unpack_slot *kept, Py_ssize_t place) {
    if (place < kept->n_values) {
        PyObject *name = PyList_GetItem(kept->names, place);
        if (PyDict_DelItem(kept->dict, name) < 0) return -1;
        kept->n_values--;
        memmove(kept->values + place, kept->values + place + 1,
                (size_t)(kept->n_values - place) * sizeof *kept->values);
    }
    return PyList_SetSlice(kept->names, place, place + 1, NULL);
}

static int unpack_removed(Unpacker *self, struct unpack_slot *kept) {
    const char *places;
    Py_ssize_t n_places, count = unpack_edit(self, kept, &places, &n_places);
    if (count < 0) return -1;
    Py_ssize_t after = PyList_Size(kept->names);
    for (Py_ssize_t i = n_places; i-- > 0;) {
        int32_t place = unpack_place(places, i);
        if (place < 0 || place >= after) return unpack_fail(self, "a name has no such place");
        if (unpack_remove(kept, place) < 0) return -1;
        after = place;
    }
    Py_ssize_t left = PyList_Size(kept->names);
    if (count < left) return unpack_fail(self, "it removes too few names");
    return unpack_more_names(self, kept->names, count - left);
}

static int unpack_all_names(Unpacker *self, struct unpack_slot *kept) {
    unpack_forget_dict(kept);
    Py_ssize_t count = unpack_count(self, sizeof(int32_t));
    step_replace(&kept->names, count < 0 ? NULL : PyList_New(0));
    return kept->names == NULL ? -1 : unpack_more_names(self, kept->names, count);
}

/* Behind the tag: the names of a slot, borrowed. */
static PyObject *unpack_names(Unpacker *self, int tag, unsigned slot) {
    int failed = -1;
    if (slot == STEP_NO_SLOT) return unpack_fail(self, "there are no names here"), NULL;
    struct unpack_slot *kept = &self->slots[slot];
    switch (tag) {
    case STEP_NAMES: failed = unpack_all_names(self, kept); break;
    case STEP_REPLACED_NAMES: failed = unpack_replaced(self, kept); break;
    case STEP_REMOVED_NAMES: failed = unpack_removed(self, kept); break;
    case STEP_SAME_NAMES:
        failed = kept->names == NULL ? unpack_fail(self, "it has no names before") : 0;
        break;
    default: unpack_fail(self, "a dict has no names");
    }
    return failed ? NULL : kept->names;
}

#endif
