/*
 * A writer's side of steps: what it keeps, numbers and names.
 *
 * The interpreter may run other code where a list or a dict is made, as that may collect garbage. So
 * whatever could end meanwhile is held, and nothing is taken for as long as it was.
 */
#ifndef VLLM_COMMEXT_SHM_STEP_WRITE_H
#define VLLM_COMMEXT_SHM_STEP_WRITE_H

#include "step_format.h"

typedef struct {
    PyObject_HEAD
    struct step_schema schema;
    PyObject *numbers;               /* dict: of each name that the readers have */
    PyObject *last[STEP_MAX_SLOTS];  /* the names of each slot as they were sent last */
    PyObject *others;                /* of the step that is being packed; NULL if there are none */
    char *data;
    size_t used, room;
    uint32_t epoch, number, n_containers;
    int has_names, in_use;
} Packer;

/* Something else has changed a container meanwhile. */
static int pack_changed(void) {
    PyErr_SetString(PyExc_RuntimeError, "a message was changed while it was sent");
    return -1;
}

/* Room for so many bytes more; NULL with an exception set. */
static char *pack_room(Packer *self, size_t bytes) {
    if (self->used + bytes > self->room) {
        size_t room = 2 * (self->used + bytes);
        char *data = PyMem_Realloc(self->data, room);
        if (data == NULL) return (void)PyErr_NoMemory(), NULL;
        self->data = data;
        self->room = room;
    }
    char *at = self->data + self->used;
    self->used += bytes;
    return at;
}

static int pack_tag(Packer *self, enum step_tag tag) {
    char *at = pack_room(self, 1);
    if (at == NULL) return -1;
    *at = (char)tag;
    return 0;
}

/* A tag and what follows it. */
static int pack_tagged(Packer *self, enum step_tag tag, const void *data, size_t bytes) {
    char *at = pack_room(self, 1 + bytes);
    if (at == NULL) return -1;
    *at = (char)tag;
    memcpy(at + 1, data, bytes);
    return 0;
}

static int pack_count(Packer *self, enum step_tag tag, Py_ssize_t count) {
    uint32_t number = (uint32_t)count;
    if ((size_t)count > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "expected less than 2**32 items, got %zd", count);
        return -1;
    }
    return pack_tagged(self, tag, &number, sizeof number);
}

static int pack_other(Packer *self, PyObject *value) {
    if (self->others == NULL && (self->others = PyList_New(0)) == NULL) return -1;
    if (PyList_Append(self->others, value) < 0) return -1;
    return pack_tag(self, STEP_OTHER);
}

/* ---- numbers ---- */

/* 1 and the number, 0 if it is no int of 32 bits. */
static inline int pack_to_int32(PyObject *item, int32_t *number) {
    int overflow;
    if (!PyLong_CheckExact(item)) return 0;
    long value = PyLong_AsLongAndOverflow(item, &overflow);
    if (overflow || value < INT32_MIN || value > INT32_MAX) return 0;
    *number = (int32_t)value;
    return 1;
}

static int pack_int(Packer *self, PyObject *value) {
    int overflow;
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return pack_other(self, value);
    if (number >= INT8_MIN && number <= INT8_MAX) {
        int8_t small = (int8_t)number;
        return pack_tagged(self, STEP_INT8, &small, sizeof small);
    }
    if (number >= INT32_MIN && number <= INT32_MAX) {
        int32_t medium = (int32_t)number;
        return pack_tagged(self, STEP_INT32, &medium, sizeof medium);
    }
    return pack_tagged(self, STEP_INT64, &number, sizeof number);
}

/* 1 if the list went as numbers, 0 if it has something else, -1 with an exception set. `rows`: each
 * item is a list of one number. */
static int pack_column(Packer *self, PyObject *list, Py_ssize_t count, int rows) {
    size_t before = self->used, differ = 1;
    uint32_t length = (uint32_t)count;
    char *at = pack_room(self, 5 + (size_t)count * sizeof(int32_t));
    if (at == NULL) return -1;
    char *to = at + 5;
    int32_t first = 0, number;
    for (Py_ssize_t i = 0; i < count; i++, to += sizeof number) {
        PyObject *item = PyList_GetItem(list, i);
        if (rows && (!PyList_CheckExact(item) || PyList_Size(item) != 1)) break;
        if (!pack_to_int32(rows ? PyList_GetItem(item, 0) : item, &number)) break;
        if (i == 0) first = number;
        differ += number != first;
        memcpy(to, &number, sizeof number);
    }
    if (to != at + 5 + (size_t)count * sizeof number) {
        self->used = before;
        return 0;
    }
    int repeats = differ == 1 && !rows && count <= STEP_MAX_REPEATS;
    if (repeats) self->used = before + 5 + sizeof number; /* the first one is there */
    *at = (char)(rows ? STEP_SINGLES : repeats ? STEP_REPEATED : STEP_INTS);
    memcpy(at + 1, &length, sizeof length);
    return 1;
}

/* ---- names ---- */

/* The bytes of a text behind their number. */
static int pack_text(Packer *self, PyObject *text) {
    Py_ssize_t bytes;
    PyObject *encoded = NULL;
    const char *data = PyUnicode_AsUTF8AndSize(text, &bytes);
    if (data == NULL) { /* a surrogate */
        PyErr_Clear();
        encoded = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
        if (encoded == NULL) return -1;
        data = PyBytes_AsString(encoded);
        bytes = PyBytes_Size(encoded);
    }
    uint32_t length = (uint32_t)bytes;
    char *at = (size_t)bytes > UINT32_MAX ? NULL : pack_room(self, sizeof length + (size_t)bytes);
    if (at != NULL) {
        memcpy(at, &length, sizeof length);
        memcpy(at + sizeof length, data, (size_t)bytes);
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_OverflowError, "expected a text of less than 4 GiB");
    }
    Py_XDECREF(encoded);
    return at == NULL ? -1 : 0;
}

/* The number of a name; behind it the name, if it is new to the readers. */
static int pack_name(Packer *self, PyObject *name) {
    int32_t number;
    PyObject *known = PyDict_GetItemWithError(self->numbers, name);
    if (known == NULL && PyErr_Occurred()) return -1;
    self->has_names = 1;
    number = known != NULL ? (int32_t)PyLong_AsLong(known) : (int32_t)PyDict_Size(self->numbers);
    char *at = pack_room(self, sizeof number);
    if (at == NULL) return -1;
    memcpy(at, &number, sizeof number);
    if (known != NULL) return 0;
    PyObject *added = PyLong_FromLong(number);
    int failed = added == NULL || PyDict_SetItem(self->numbers, name, added) < 0 ||
                 pack_text(self, name) < 0;
    Py_XDECREF(added);
    return failed ? -1 : 0;
}

static int pack_is_names(PyObject *list, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyUnicode_CheckExact(PyList_GetItem(list, i))) return 0;
    return count > 0;
}

/* Both are lists of exact strings that long. */
static inline int pack_is_same_name(PyObject *one, Py_ssize_t at, PyObject *other, Py_ssize_t there) {
    PyObject *mine = PyList_GetItem(one, at), *theirs = PyList_GetItem(other, there);
    return mine == theirs || PyUnicode_Compare(mine, theirs) == 0;
}

/* The head of an edit, with room for the number of its places; where that is, or -1. */
static Py_ssize_t pack_edit_head(Packer *self, enum step_tag tag, Py_ssize_t count) {
    uint32_t places = 0;
    if (pack_count(self, tag, count) < 0) return -1;
    char *at = pack_room(self, sizeof places);
    return at == NULL ? -1 : at - self->data;
}

static int pack_place(Packer *self, Py_ssize_t place) {
    int32_t number = (int32_t)place;
    char *at = pack_room(self, sizeof number);
    if (at == NULL) return -1;
    memcpy(at, &number, sizeof number);
    return 0;
}

static int pack_names_from(Packer *self, PyObject *names, Py_ssize_t first) {
    for (Py_ssize_t i = first; i < PyList_Size(names); i++)
        if (pack_name(self, PyList_GetItem(names, i)) < 0) return -1;
    return 0;
}

/* 1 if `names` went as `last` with names in some places, 0 if these are too many, or -1. */
static int pack_replaced(Packer *self, PyObject *last, PyObject *names, uint32_t most) {
    size_t before = self->used;
    Py_ssize_t old = PyList_Size(last), count = PyList_Size(names);
    Py_ssize_t head = pack_edit_head(self, STEP_REPLACED_NAMES, count);
    uint32_t places = 0;
    if (head < 0) return -1;
    for (Py_ssize_t i = 0; places <= most && i < old && i < count; i++) {
        if (pack_is_same_name(last, i, names, i)) continue;
        places++;
        if (pack_place(self, i) < 0) return -1;
    }
    if (places > most || count - old > (Py_ssize_t)most) {
        self->used = before;
        return 0;
    }
    memcpy(self->data + head, &places, sizeof places);
    for (uint32_t i = 0; i < places; i++) {
        int32_t place;
        memcpy(&place, self->data + head + (1 + i) * sizeof place, sizeof place);
        if (pack_name(self, PyList_GetItem(names, place)) < 0) return -1;
    }
    return pack_names_from(self, names, old) < 0 ? -1 : 1;
}

/* 1 if `names` went as `last` without some and with others at the end, 0 if these are too many. */
static int pack_removed(Packer *self, PyObject *last, PyObject *names, uint32_t most) {
    size_t before = self->used;
    Py_ssize_t old = PyList_Size(last), count = PyList_Size(names), kept = 0;
    Py_ssize_t head = pack_edit_head(self, STEP_REMOVED_NAMES, count);
    uint32_t places = 0;
    if (head < 0) return -1;
    for (Py_ssize_t i = 0; places <= most && i < old; i++) {
        if (kept < count && pack_is_same_name(last, i, names, kept)) {
            kept++;
            continue;
        }
        places++;
        if (pack_place(self, i) < 0) return -1;
    }
    if (places > most || count - kept > (Py_ssize_t)most) {
        self->used = before;
        return 0;
    }
    memcpy(self->data + head, &places, sizeof places);
    return pack_names_from(self, names, kept) < 0 ? -1 : 1;
}

/* `own`: a list of nothing but exact strings that nobody else has. */
static int pack_own_names(Packer *self, PyObject *last, PyObject *own) {
    Py_ssize_t count = PyList_Size(own), same = 0;
    if (last != NULL) {
        Py_ssize_t old = PyList_Size(last);
        while (same < count && same < old && pack_is_same_name(last, same, own, same)) same++;
        if (same == count && same == old) return pack_tag(self, STEP_SAME_NAMES);
        uint32_t most = (uint32_t)(old / 4 + 1);
        int done = pack_replaced(self, last, own, most);
        if (done == 0) done = pack_removed(self, last, own, most);
        if (done != 0) return done < 0 ? -1 : 0;
    }
    return pack_count(self, STEP_NAMES, count) < 0 ? -1 : pack_names_from(self, own, 0);
}

/* `names`: pack_is_names. */
static int pack_names(Packer *self, PyObject *names, unsigned slot) {
    PyObject *last = self->last[slot], *own = PyList_GetSlice(names, 0, PyList_Size(names));
    if (own == NULL) return -1;
    self->has_names = 1;
    self->last[slot] = own;
    int failed = pack_own_names(self, last, own);
    Py_XDECREF(last);
    return failed;
}

#endif
