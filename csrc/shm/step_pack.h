/* A writer's side of steps: values, and the type that Python sees. */
#ifndef VLLM_COMMEXT_SHM_STEP_PACK_H
#define VLLM_COMMEXT_SHM_STEP_PACK_H

#include "step_write.h"

static int pack_value(Packer *self, PyObject *value, unsigned slot, int depth);

/* A borrowed reference; NULL, with an exception set, for one that is gone. */
static int pack_item(Packer *self, PyObject *value, unsigned slot, int depth) {
    if (value == NULL) return -1;
    Py_INCREF(value);
    int failed = pack_value(self, value, slot, depth);
    Py_DECREF(value);
    return failed;
}

static int pack_string(Packer *self, PyObject *text, unsigned slot) {
    if (slot != STEP_NO_SLOT) return pack_tag(self, STEP_NAME) < 0 ? -1 : pack_name(self, text);
    PyObject *known = PyDict_GetItemWithError(self->numbers, text);
    if (known == NULL) {
        if (PyErr_Occurred()) return -1;
        return pack_tag(self, STEP_TEXT) < 0 ? -1 : pack_text(self, text);
    }
    int32_t number = (int32_t)PyLong_AsLong(known);
    self->has_names = 1;
    return pack_tagged(self, STEP_KNOWN, &number, sizeof number);
}

/* ---- containers ---- */

static int pack_list(Packer *self, PyObject *list, unsigned slot, int depth) {
    Py_ssize_t count = PyList_Size(list);
    if (slot != STEP_NO_SLOT && pack_is_names(list, count)) return pack_names(self, list, slot);
    if (count > 0) {
        PyObject *first = PyList_GetItem(list, 0);
        int rows = PyList_CheckExact(first), done = 0;
        if (rows || PyLong_CheckExact(first)) done = pack_column(self, list, count, rows);
        if (done != 0) return done < 0 ? -1 : 0;
    }
    if (pack_count(self, STEP_LIST, count) < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (pack_item(self, PyList_GetItem(list, i), STEP_NO_SLOT, depth) < 0) return -1;
    return 0;
}

static int pack_tuple(Packer *self, PyObject *tuple, int depth) {
    Py_ssize_t count = PyTuple_Size(tuple);
    if (pack_count(self, STEP_TUPLE, count) < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (pack_item(self, PyTuple_GetItem(tuple, i), STEP_NO_SLOT, depth) < 0) return -1;
    return 0;
}

static int pack_set(Packer *self, PyObject *set, int depth) {
    PyObject *item, *items;
    Py_ssize_t count = PySet_Size(set);
    if (pack_count(self, STEP_SET, count) < 0) return -1;
    if (count == 0) return 0;
    if ((items = PyObject_GetIter(set)) == NULL) return -1;
    for (; (item = PyIter_Next(items)) != NULL; count--) {
        int failed = pack_value(self, item, STEP_NO_SLOT, depth) < 0;
        Py_DECREF(item);
        if (failed) break;
    }
    Py_DECREF(items);
    if (item != NULL || PyErr_Occurred()) return -1;
    return count == 0 ? 0 : pack_changed();
}

/* 1 if all keys were names and it is packed, 0 if not, -1 with an exception set. */
static int pack_named(Packer *self, PyObject *dict, unsigned slot, int depth) {
    PyObject *names = PyDict_Keys(dict);
    if (names == NULL) return -1;
    int done = pack_is_names(names, PyList_Size(names));
    if (done) {
        PyObject *values = PyDict_Values(dict);
        if (values == NULL || PyList_Size(values) != PyList_Size(names))
            done = values == NULL ? -1 : pack_changed();
        else if (pack_tag(self, STEP_NAMED) < 0 || pack_names(self, names, slot) < 0 ||
                 pack_list(self, values, STEP_NO_SLOT, depth) < 0)
            done = -1;
        Py_XDECREF(values);
    }
    Py_DECREF(names);
    return done;
}

static int pack_dict(Packer *self, PyObject *dict, unsigned slot, int depth) {
    PyObject *key, *value;
    Py_ssize_t at = 0, count = PyDict_Size(dict), left = count;
    if (slot != STEP_NO_SLOT && count > 0) {
        int done = pack_named(self, dict, slot, depth);
        if (done != 0) return done < 0 ? -1 : 0;
    }
    if (pack_count(self, STEP_DICT, count) < 0) return -1;
    for (; PyDict_Next(dict, &at, &key, &value); left--) {
        Py_INCREF(value);
        int failed = pack_item(self, key, STEP_NO_SLOT, depth) < 0 ||
                     pack_value(self, value, STEP_NO_SLOT, depth) < 0;
        Py_DECREF(value);
        if (failed) return -1;
    }
    return left == 0 ? 0 : pack_changed();
}

/* Whether the dict has exactly these keys in this order. */
static int pack_has_fields(PyObject *dict, const struct step_kind *kind) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (PyDict_Size(dict) != kind->n_fields) return 0;
    for (Py_ssize_t i = 0; PyDict_Next(dict, &at, &key, &value); i++) {
        PyObject *field = PyTuple_GetItem(kind->fields, i);
        if (key == field) continue;
        if (!PyUnicode_CheckExact(key) || PyUnicode_Compare(key, field) != 0) return 0;
    }
    return 1;
}

static int pack_object(Packer *self, PyObject *object, unsigned char number, int depth) {
    const struct step_kind *kind = &self->schema.kinds[number];
    PyObject *key, *value, *dict = PyObject_GenericGetDict(object, NULL);
    Py_ssize_t at = 0;
    if (dict == NULL) return -1;
    int failed = 0;
    if (!pack_has_fields(dict, kind)) {
        failed = pack_other(self, object) < 0;
    } else {
        failed = pack_tagged(self, STEP_OBJECT, &number, 1) < 0;
        Py_ssize_t i = 0;
        for (; !failed && i < kind->n_fields && PyDict_Next(dict, &at, &key, &value); i++)
            failed = pack_item(self, value, kind->slots[i], depth) < 0;
        if (!failed && i != kind->n_fields) failed = pack_changed() < 0;
    }
    Py_DECREF(dict);
    return failed ? -1 : 0;
}

static int pack_value(Packer *self, PyObject *value, unsigned slot, int depth) {
    if (value == Py_None) return pack_tag(self, STEP_NONE);
    if (value == Py_True) return pack_tag(self, STEP_TRUE);
    if (value == Py_False) return pack_tag(self, STEP_FALSE);
    if (PyLong_CheckExact(value)) return pack_int(self, value);
    if (PyUnicode_CheckExact(value)) return pack_string(self, value, slot);
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        return pack_tagged(self, STEP_FLOAT, &number, sizeof number);
    }
    if (depth++ == STEP_MAX_DEPTH) return pack_other(self, value);
    if (++self->n_containers > STEP_MAX_CONTAINERS) return -1;
    if (PyList_CheckExact(value)) return pack_list(self, value, slot, depth);
    if (PyTuple_CheckExact(value)) return pack_tuple(self, value, depth);
    if (PyDict_CheckExact(value)) return pack_dict(self, value, slot, depth);
    if (Py_IS_TYPE(value, &PySet_Type)) return pack_set(self, value, depth);
    for (Py_ssize_t i = 0; i < self->schema.n_kinds; i++)
        if ((PyObject *)Py_TYPE(value) == self->schema.kinds[i].type)
            return pack_object(self, value, (unsigned char)i, depth);
    for (Py_ssize_t i = PyTuple_Size(self->schema.constants); i-- > 0;) {
        unsigned char place = (unsigned char)i;
        if (value == PyTuple_GetItem(self->schema.constants, i))
            return pack_tagged(self, STEP_CONSTANT, &place, 1);
    }
    return pack_other(self, value);
}

/* ---- the type ---- */

/* With no names known, because a step was not sent, or too many have been. */
static int packer_begin_epoch(Packer *self) {
    self->epoch = self->epoch == UINT32_MAX ? 1 : self->epoch + 1; /* 0 is for steps without names */
    self->number = 0;
    for (int slot = 0; slot < STEP_MAX_SLOTS; slot++) Py_CLEAR(self->last[slot]);
    step_replace(&self->numbers, PyDict_New());
    return self->numbers == NULL ? -1 : 0;
}

/* A call (a method's name and three more) or an answer (a constant and one more). */
static int packer_takes(Packer *self, PyObject *message) {
    if (!PyTuple_CheckExact(message)) return 0;
    Py_ssize_t count = PyTuple_Size(message);
    if (count == 4) return PyUnicode_CheckExact(PyTuple_GetItem(message, 0));
    for (Py_ssize_t i = PyTuple_Size(self->schema.constants); count == 2 && i-- > 0;)
        if (PyTuple_GetItem(message, 0) == PyTuple_GetItem(self->schema.constants, i)) return 1;
    return 0;
}

static PyObject *packer_finish(Packer *self) {
    struct step_header header = {
        .mark = STEP_MARK, .fingerprint = self->schema.fingerprint,
        .body_bytes = (uint32_t)(self->used - sizeof header),
    };
    if (self->used > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "expected a step of less than 4 GiB");
        return NULL;
    }
    if (self->has_names) {
        header.epoch = self->epoch;
        header.number = self->number++;
    }
    memcpy(self->data, &header, sizeof header);
    PyObject *others = self->others != NULL ? self->others : Py_None;
    PyObject *body = PyBytes_FromStringAndSize(self->data, (Py_ssize_t)self->used);
    return Py_BuildValue("(NO)", body, others);
}

/* pack(message) -> (bytes, list to be pickled after it or None), or None if it is no step. */
static PyObject *Packer_pack(PyObject *op, PyObject *message) {
    Packer *self = (Packer *)op;
    if (!packer_takes(self, message)) Py_RETURN_NONE;
    if (self->in_use) return PyErr_SetString(PyExc_RuntimeError, STEP_IN_USE), NULL;
    int is_full = self->numbers == NULL || self->number >= STEP_EPOCH_STEPS ||
                  PyDict_Size(self->numbers) >= STEP_MAX_NAMES;
    if (is_full && packer_begin_epoch(self) < 0) return NULL;
    self->used = self->n_containers = 0;
    self->has_names = 0;
    if (pack_room(self, sizeof(struct step_header)) == NULL) return NULL;
    PyObject *packed = NULL;
    self->in_use = 1;
    int failed = pack_tuple(self, message, 0) < 0;
    self->in_use = 0;
    if (!failed) {
        packed = packer_finish(self);
    } else if (!PyErr_Occurred() && packer_begin_epoch(self) == 0) { /* too many containers */
        packed = Py_None;
        Py_INCREF(packed);
    }
    Py_CLEAR(self->others);
    return packed;
}

/* forget(): the last step was not sent. */
static PyObject *Packer_forget(PyObject *op, PyObject *Py_UNUSED(ignored)) {
    if (((Packer *)op)->in_use) return PyErr_SetString(PyExc_RuntimeError, STEP_IN_USE), NULL;
    if (packer_begin_epoch((Packer *)op) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *Packer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *kinds, *constants;
    unsigned int fingerprint;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!I", &PyTuple_Type, &kinds, &PyTuple_Type, &constants,
                          &fingerprint))
        return NULL;
    Packer *self = (Packer *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(constants);
    self->schema.constants = constants;
    self->schema.fingerprint = fingerprint;
    if (step_read_schema(&self->schema, kinds) < 0 || packer_begin_epoch(self) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static void Packer_dealloc(PyObject *op) {
    Packer *self = (Packer *)op;
    PyTypeObject *type = Py_TYPE(op);
    step_clear_schema(&self->schema);
    for (int slot = 0; slot < STEP_MAX_SLOTS; slot++) Py_CLEAR(self->last[slot]);
    Py_CLEAR(self->numbers);
    Py_CLEAR(self->others);
    PyMem_Free(self->data);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

static PyMethodDef packer_methods[] = {
    {"pack", Packer_pack, METH_O,
     "pack(message) -> (bytes, list to be pickled after it or None), or None if it is no step"},
    {"forget", Packer_forget, METH_NOARGS, "forget(): the last step was not sent"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot packer_slots[] = {
    {Py_tp_doc, (void *)"A writer's side of steps: Packer(classes, constants, fingerprint)."},
    {Py_tp_new, (void *)Packer_new},
    {Py_tp_dealloc, (void *)Packer_dealloc},
    {Py_tp_methods, packer_methods},
    {0, NULL},
};

static PyType_Spec packer_spec = {
    .name = "vllm_commext.shm._shm_ring.Packer",
    .basicsize = sizeof(Packer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = packer_slots,
};

#endif
