/* A reader's side of steps: values, and the type that Python sees. */
#ifndef VLLM_COMMEXT_SHM_STEP_UNPACK_H
#define VLLM_COMMEXT_SHM_STEP_UNPACK_H

#include "step_read.h"

static PyObject *unpack_value(Unpacker *self, unsigned slot, int depth);

/* ---- lists ---- */

static PyObject *unpack_ints(Unpacker *self) {
    Py_ssize_t count = unpack_count(self, sizeof(int32_t));
    if (count < 0) return NULL;
    const char *at = unpack_bytes(self, (size_t)count * sizeof(int32_t));
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        int32_t number;
        memcpy(&number, at + i * (Py_ssize_t)sizeof number, sizeof number);
        PyObject *item = PyLong_FromLong(number);
        if (item == NULL || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *unpack_singles(Unpacker *self) {
    Py_ssize_t count = unpack_count(self, sizeof(int32_t));
    if (count < 0) return NULL;
    const char *at = unpack_bytes(self, (size_t)count * sizeof(int32_t));
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        int32_t number;
        memcpy(&number, at + i * (Py_ssize_t)sizeof number, sizeof number);
        PyObject *row = PyList_New(1), *item = PyLong_FromLong(number);
        if (row == NULL || item == NULL) {
            Py_XDECREF(row);
            Py_XDECREF(item);
            Py_CLEAR(list);
        } else {
            PyList_SetItem(row, 0, item);
            PyList_SetItem(list, i, row);
        }
    }
    return list;
}

static PyObject *unpack_repeated(Unpacker *self) {
    uint32_t count;
    int32_t number;
    const char *at = unpack_bytes(self, sizeof count);
    if (at == NULL || unpack_int32(self, &number) < 0) return NULL;
    memcpy(&count, at, sizeof count);
    if (count > STEP_MAX_REPEATS) return unpack_fail(self, "it repeats a number too often"), NULL;
    PyObject *item = PyLong_FromLong(number), *list = item == NULL ? NULL : PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < (Py_ssize_t)count; i++) {
        Py_INCREF(item);
        PyList_SetItem(list, i, item);
    }
    Py_XDECREF(item);
    return list;
}

static PyObject *unpack_items(Unpacker *self, int tag, int depth) {
    Py_ssize_t count = unpack_count(self, 1);
    if (count < 0) return NULL;
    int is_list = tag == STEP_LIST;
    PyObject *made = is_list ? PyList_New(count) : PyTuple_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *item = unpack_value(self, STEP_NO_SLOT, depth);
        if (item == NULL)
            Py_CLEAR(made);
        else if (is_list)
            PyList_SetItem(made, i, item);
        else
            PyTuple_SetItem(made, i, item);
    }
    return made;
}

static PyObject *unpack_set(Unpacker *self, int depth) {
    Py_ssize_t count = unpack_count(self, 1);
    PyObject *set = count < 0 ? NULL : PySet_New(NULL);
    for (Py_ssize_t i = 0; set != NULL && i < count; i++) {
        PyObject *item = unpack_value(self, STEP_NO_SLOT, depth);
        if (item == NULL || PySet_Add(set, item) < 0) Py_CLEAR(set);
        Py_XDECREF(item);
    }
    return set;
}

/* ---- dicts ---- */

static PyObject *unpack_dict(Unpacker *self, int depth) {
    Py_ssize_t count = unpack_count(self, 2);
    PyObject *dict = count < 0 ? NULL : PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < count; i++) {
        PyObject *key = unpack_value(self, STEP_NO_SLOT, depth);
        PyObject *value = key == NULL ? NULL : unpack_value(self, STEP_NO_SLOT, depth);
        if (value == NULL || PyDict_SetItem(dict, key, value) < 0) Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

/* Room for so many values. */
static int32_t *unpack_room(struct unpack_slot *kept, Py_ssize_t count) {
    if (count <= kept->room) return kept->values;
    int32_t *values = PyMem_Realloc(kept->values, (size_t)(2 * count) * sizeof *values);
    if (values == NULL) return (void)PyErr_NoMemory(), NULL;
    kept->values = values;
    kept->room = 2 * count;
    return values;
}

/* Put the numbers that follow, or one over and over if `step` is 0, into the dict that is kept. */
static int unpack_change_dict(struct unpack_slot *kept, const char *at, size_t step,
                              Py_ssize_t count) {
    int32_t number, *values = unpack_room(kept, count);
    if (values == NULL) return -1;
    for (Py_ssize_t i = 0; i < count; i++, at += step) {
        memcpy(&number, at, sizeof number);
        if (i < kept->n_values && values[i] == number) continue;
        PyObject *item = PyLong_FromLong(number);
        int failed = item == NULL ||
                     PyDict_SetItem(kept->dict, PyList_GetItem(kept->names, i), item) < 0;
        Py_XDECREF(item);
        if (failed) return -1;
        values[i] = number;
    }
    kept->n_values = count;
    return 0;
}

/* A dict by these names whose values are int32. */
static PyObject *unpack_named_ints(Unpacker *self, struct unpack_slot *kept) {
    uint32_t count;
    int is_one = *unpack_bytes(self, 1) == STEP_REPEATED;
    const char *at = unpack_bytes(self, sizeof count);
    if (at == NULL) return NULL;
    memcpy(&count, at, sizeof count);
    if (count != PyList_Size(kept->names))
        return unpack_fail(self, "a dict has more names than values, or fewer"), NULL;
    at = unpack_bytes(self, sizeof(int32_t) * (is_one ? 1 : count));
    if (at == NULL || (kept->dict == NULL && (kept->dict = PyDict_New()) == NULL)) return NULL;
    if (unpack_change_dict(kept, at, is_one ? 0 : sizeof(int32_t), count) == 0)
        return PyDict_Copy(kept->dict);
    unpack_forget_dict(kept);
    return NULL;
}

/* A dict by these names of anything else. */
static PyObject *unpack_named_values(Unpacker *self, struct unpack_slot *kept, int depth) {
    PyObject *dict = NULL, *names = PyList_GetSlice(kept->names, 0, PyList_Size(kept->names));
    if (names == NULL) return NULL; /* its own: a value may hold names of the same slot */
    unpack_forget_dict(kept);
    PyObject *values = unpack_value(self, STEP_NO_SLOT, depth);
    if (values != NULL) {
        if (PyList_CheckExact(values) && PyList_Size(values) == PyList_Size(names))
            dict = PyDict_New();
        else
            unpack_fail(self, "a dict has more names than values, or fewer");
    }
    for (Py_ssize_t i = 0; dict != NULL && i < PyList_Size(names); i++)
        if (PyDict_SetItem(dict, PyList_GetItem(names, i), PyList_GetItem(values, i)) < 0)
            Py_CLEAR(dict);
    Py_XDECREF(values);
    Py_DECREF(names);
    return dict;
}

static PyObject *unpack_named(Unpacker *self, unsigned slot, int depth) {
    const char *tag = unpack_bytes(self, 1);
    if (tag == NULL || unpack_names(self, *tag, slot) == NULL) return NULL;
    if (self->at != self->end && (*self->at == STEP_INTS || *self->at == STEP_REPEATED))
        return unpack_named_ints(self, &self->slots[slot]);
    return unpack_named_values(self, &self->slots[slot], depth);
}

/* ---- everything else ---- */

static PyObject *unpack_object(Unpacker *self, int depth) {
    const char *number = unpack_bytes(self, 1);
    if (number == NULL) return NULL;
    if ((unsigned char)*number >= self->schema.n_kinds)
        return unpack_fail(self, "there is no such class"), NULL;
    const struct step_kind *kind = &self->schema.kinds[(unsigned char)*number];
    PyTypeObject *type = (PyTypeObject *)kind->type;
    PyObject *nothing = PyTuple_New(0);
    if (nothing == NULL) return NULL;
    PyObject *made = ((newfunc)PyType_GetSlot(type, Py_tp_new))(type, nothing, NULL);
    Py_DECREF(nothing);
    PyObject *dict = made == NULL ? NULL : PyObject_GenericGetDict(made, NULL);
    int failed = dict == NULL;
    for (Py_ssize_t i = 0; !failed && i < kind->n_fields; i++) {
        PyObject *value = unpack_value(self, kind->slots[i], depth);
        failed = value == NULL || PyDict_SetItem(dict, PyTuple_GetItem(kind->fields, i), value) < 0;
        Py_XDECREF(value);
    }
    Py_XDECREF(dict);
    if (failed) Py_CLEAR(made);
    return made;
}

static PyObject *unpack_constant(Unpacker *self) {
    const char *place = unpack_bytes(self, 1);
    if (place == NULL) return NULL;
    if ((unsigned char)*place >= PyTuple_Size(self->schema.constants))
        return unpack_fail(self, "there is no such constant"), NULL;
    PyObject *found = PyTuple_GetItem(self->schema.constants, (unsigned char)*place);
    Py_INCREF(found);
    return found;
}

static PyObject *unpack_other(Unpacker *self) {
    if (self->others == NULL) Py_RETURN_NONE;
    if (self->next_other >= PyList_Size(self->others))
        return unpack_fail(self, "fewer objects were pickled than it names"), NULL;
    PyObject *found = PyList_GetItem(self->others, self->next_other++);
    Py_INCREF(found);
    return found;
}

static PyObject *unpack_number(Unpacker *self, int tag) {
    int8_t small;
    int32_t medium;
    int64_t large;
    double number;
    size_t bytes = tag == STEP_INT8 ? 1 : tag == STEP_INT32 ? 4 : 8;
    const char *at = unpack_bytes(self, bytes);
    if (at == NULL) return NULL;
    switch (tag) {
    case STEP_INT8: return memcpy(&small, at, 1), PyLong_FromLong(small);
    case STEP_INT32: return memcpy(&medium, at, 4), PyLong_FromLong(medium);
    case STEP_INT64: return memcpy(&large, at, 8), PyLong_FromLongLong(large);
    default: return memcpy(&number, at, 8), PyFloat_FromDouble(number);
    }
}

static PyObject *unpack_new_reference(PyObject *borrowed) {
    Py_XINCREF(borrowed);
    return borrowed;
}

static PyObject *unpack_value(Unpacker *self, unsigned slot, int depth) {
    const char *tag = unpack_bytes(self, 1);
    if (tag == NULL) return NULL;
    if (depth++ > STEP_MAX_DEPTH + 1) /* the message itself is one */
        return unpack_fail(self, "it is too deep"), NULL;
    switch (*tag) {
    case STEP_NONE: Py_RETURN_NONE;
    case STEP_TRUE: Py_RETURN_TRUE;
    case STEP_FALSE: Py_RETURN_FALSE;
    case STEP_INT8: case STEP_INT32: case STEP_INT64: case STEP_FLOAT:
        return unpack_number(self, *tag);
    case STEP_TEXT: return unpack_text(self);
    case STEP_KNOWN: case STEP_NAME:
        return unpack_new_reference(unpack_name(self, *tag == STEP_NAME));
    case STEP_LIST: case STEP_TUPLE: return unpack_items(self, *tag, depth);
    case STEP_SET: return unpack_set(self, depth);
    case STEP_DICT: return unpack_dict(self, depth);
    case STEP_INTS: return unpack_ints(self);
    case STEP_REPEATED: return unpack_repeated(self);
    case STEP_SINGLES: return unpack_singles(self);
    case STEP_NAMES: case STEP_SAME_NAMES: case STEP_REPLACED_NAMES: case STEP_REMOVED_NAMES: {
        PyObject *names = unpack_names(self, *tag, slot);
        return names == NULL ? NULL : PyList_GetSlice(names, 0, PyList_Size(names));
    }
    case STEP_NAMED: return unpack_named(self, slot, depth);
    case STEP_OBJECT: return unpack_object(self, depth);
    case STEP_CONSTANT: return unpack_constant(self);
    case STEP_OTHER: return unpack_other(self);
    default: return unpack_fail(self, "it has an unknown tag"), NULL;
    }
}

/* ---- the type ---- */

static void unpacker_forget(Unpacker *self) {
    for (int slot = 0; slot < STEP_MAX_SLOTS; slot++) unpack_forget_slot(&self->slots[slot]);
}

/* Whether the step follows the one before. */
static int unpacker_follow(Unpacker *self, const struct step_header *header) {
    if (header->epoch == 0) return 0;
    if (header->number == 0) {
        PyObject *names = PyList_New(0);
        if (names == NULL) return -1;
        unpacker_forget(self);
        step_replace(&self->names, names);
    } else if (header->epoch != self->epoch || header->number != self->number + 1) {
        PyErr_Format(self->error,
                     "expected step %u of epoch %u, got %u of %u: this reader has lost one to an "
                     "error; it goes on with the writer's next epoch",
                     self->number + 1, self->epoch, header->number, header->epoch);
        return -1;
    }
    self->epoch = 0; /* until all of it has been followed */
    return 0;
}

/* The objects that were pickled behind the step, as a list. */
static PyObject *unpacker_load(Unpacker *self, PyObject *loads, const char *data, Py_ssize_t bytes) {
    PyObject *pickled = PyBytes_FromStringAndSize(data, bytes);
    if (pickled == NULL) return NULL;
    PyObject *others = PyObject_CallFunctionObjArgs(loads, pickled, NULL);
    Py_DECREF(pickled);
    if (others != NULL && !PyList_CheckExact(others)) {
        unpack_fail(self, "what was pickled is no list");
        Py_CLEAR(others);
    }
    return others;
}

/* The message between these bytes. `others`: NULL to learn its names only. */
static PyObject *unpacker_run(Unpacker *self, const struct step_header *header, const char *body,
                              PyObject *others) {
    self->at = body;
    self->end = body + header->body_bytes;
    self->others = others;
    self->next_other = 0;
    PyObject *message = unpack_value(self, STEP_NO_SLOT, 0);
    self->others = NULL;
    if (message != NULL && self->at != self->end) {
        unpack_fail(self, "it is too long");
        Py_CLEAR(message);
    }
    if (message != NULL && header->epoch != 0) {
        self->epoch = header->epoch;
        self->number = header->number;
    }
    return message;
}

/* The message of `bytes` at `data`. */
static PyObject *unpacker_unpack(Unpacker *self, const char *data, Py_ssize_t bytes,
                                 PyObject *loads) {
    struct step_header header;
    PyObject *others = NULL, *type = NULL, *value = NULL, *trace = NULL;
    self->at = data;
    self->end = data + bytes;
    const char *at = unpack_bytes(self, sizeof header);
    if (at == NULL) return NULL;
    memcpy(&header, at, sizeof header);
    if (header.fingerprint != self->schema.fingerprint) {
        PyErr_SetString(self->error,
                        "the writer's vLLM has other fields in its steps than this process's: install "
                        "the same vLLM and the same vllm-commext on every host");
        return NULL;
    }
    const char *body = unpack_bytes(self, header.body_bytes), *rest = self->at;
    if (body == NULL || unpacker_follow(self, &header) < 0) return NULL;
    if (rest != data + bytes) {
        others = unpacker_load(self, loads, rest, data + bytes - rest);
        if (others == NULL) PyErr_Fetch(&type, &value, &trace);
    }
    PyObject *message = unpacker_run(self, &header, body, others);
    Py_XDECREF(others);
    if (type != NULL) { /* its names have been learned, and nothing else is wanted of it */
        Py_CLEAR(message);
        PyErr_Restore(type, value, trace);
    }
    return message;
}

/* unpack(head, loads) -> message. `loads` is called with what stands behind the step. */
static PyObject *Unpacker_unpack(PyObject *op, PyObject *args) {
    Unpacker *self = (Unpacker *)op;
    PyObject *head, *loads;
    if (!PyArg_ParseTuple(args, "SO", &head, &loads)) return NULL;
    if (self->in_use) return PyErr_SetString(PyExc_RuntimeError, STEP_IN_USE), NULL;
    self->in_use = 1;
    PyObject *message = unpacker_unpack(self, PyBytes_AsString(head), PyBytes_Size(head), loads);
    self->in_use = 0;
    return message;
}

static PyObject *Unpacker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *kinds, *constants, *error;
    unsigned int fingerprint;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!IO", &PyTuple_Type, &kinds, &PyTuple_Type, &constants,
                          &fingerprint, &error))
        return NULL;
    Unpacker *self = (Unpacker *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(constants);
    Py_INCREF(error);
    self->schema.constants = constants;
    self->schema.fingerprint = fingerprint;
    self->error = error;
    self->names = PyList_New(0);
    if (self->names == NULL || step_read_schema(&self->schema, kinds) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static void Unpacker_dealloc(PyObject *op) {
    Unpacker *self = (Unpacker *)op;
    PyTypeObject *type = Py_TYPE(op);
    unpacker_forget(self);
    step_clear_schema(&self->schema);
    Py_CLEAR(self->names);
    Py_CLEAR(self->error);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

static PyMethodDef unpacker_methods[] = {
    {"unpack", Unpacker_unpack, METH_VARARGS,
     "unpack(head, loads) -> message; `loads` is called with what stands behind the step"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot unpacker_slots[] = {
    {Py_tp_doc, (void *)"A reader's side of steps: Unpacker(classes, constants, fingerprint, error)."},
    {Py_tp_new, (void *)Unpacker_new},
    {Py_tp_dealloc, (void *)Unpacker_dealloc},
    {Py_tp_methods, unpacker_methods},
    {0, NULL},
};

static PyType_Spec unpacker_spec = {
    .name = "vllm_commext.shm._shm_ring.Unpacker",
    .basicsize = sizeof(Unpacker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = unpacker_slots,
};

#endif
