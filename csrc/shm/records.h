/*
 * One end of the ring as a Python object, and how records come from and become Python objects.
 *
 * The limited API of Python 3.10 has no buffer structure. Memory is reached through bytes,
 * bytearray, and PyObject_AsReadBuffer, whose symbol is part of the stable ABI, on a memoryview
 * that keeps the exporter from moving it.
 */
#ifndef VLLM_COMMEXT_SHM_RECORDS_H
#define VLLM_COMMEXT_SHM_RECORDS_H

#include "limited_api.h" /* Python's headers come first */

#include <math.h>

#include "core.h"
#include "read.h"
#include "write.h"

#define RING_SMALL_BYTES (64u << 10) /* copying more than this releases the interpreter's lock */

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* for PyObject_AsReadBuffer alone */

typedef struct {
    PyObject_HEAD
    struct ring_end end;
    unsigned long process; /* ring_generation of the process that opened this end */
    int in_use;            /* by a thread that may have released the interpreter's lock */
    int kept;              /* a record was begun and timed out; the next call may go on with it */
    PyObject *received;    /* bytes, or a list of bytes and bytearray: the record in progress */
} RingObject;

static unsigned long ring_generation; /* counts the forks that led to this process */

/* ---- arguments ---- */

static int check_usable(RingObject *self, int as_writer) {
    if (self->process != ring_generation) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this end of the queue belongs to the process that opened it; a forked "
                        "child has to attach by itself");
        return -1;
    }
    if ((self->end.rank == RING_WRITER) != as_writer) {
        PyErr_SetString(PyExc_RuntimeError, as_writer ? "only the writer can do this"
                                                      : "only a reader can do this");
        return -1;
    }
    if (self->in_use) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this end of the queue is in use by another thread, or by the call that a "
                        "signal handler interrupted");
        return -1;
    }
    return 0;
}

static int check_count(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return 0;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
    return -1;
}

/* Seconds or None to nanoseconds or RING_NEVER. */
static int to_nanoseconds(PyObject *timeout, uint64_t *nanoseconds) {
    *nanoseconds = RING_NEVER;
    if (timeout == Py_None) return 0;
    double seconds = PyFloat_AsDouble(timeout);
    if (seconds == -1.0 && PyErr_Occurred()) return -1;
    if (isnan(seconds)) {
        PyErr_SetString(PyExc_ValueError, "timeout must be a number of seconds or None, not NaN");
        return -1;
    }
    if (seconds >= 1e9) return 0; /* 31 years */
    *nanoseconds = seconds <= 0 ? 0 : (uint64_t)(seconds * 1e9);
    return 0;
}

static uint64_t deadline_after(uint64_t nanoseconds) {
    return nanoseconds == RING_NEVER ? RING_NEVER : ring_now() + nanoseconds;
}

/* ---- writing ---- */

struct outgoing {
    uint32_t n_parts, n_spans;
    uint64_t table[RING_MAX_PARTS];
    struct ring_part spans[RING_MAX_PARTS + 1]; /* the table, if any, and the parts */
    PyObject *views[RING_MAX_PARTS];
};

static int add_span(struct outgoing *out, PyObject *part) {
    struct ring_part *span = &out->spans[out->n_spans];
    uint64_t *entry = &out->table[out->n_parts];
    Py_ssize_t bytes;
    out->views[out->n_parts] = NULL;
    if (PyBytes_Check(part)) {
        char *data;
        if (PyBytes_AsStringAndSize(part, &data, &bytes) < 0) return -1;
        span->data = (unsigned char *)data;
        *entry = (uint64_t)bytes | RING_IMMUTABLE;
    } else {
        const void *data;
        PyObject *view = PyMemoryView_FromObject(part);
        if (view == NULL) return -1;
        if (PyObject_AsReadBuffer(view, &data, &bytes) < 0) {
            Py_DECREF(view);
            return -1;
        }
        out->views[out->n_parts] = view;
        span->data = (unsigned char *)(uintptr_t)data;
        *entry = (uint64_t)bytes;
    }
    span->bytes = (uint64_t)bytes;
    out->n_parts++;
    out->n_spans++;
    return 0;
}

static void release_spans(struct outgoing *out) {
    for (uint32_t i = 0; i < out->n_parts; i++) Py_XDECREF(out->views[i]);
}

static int add_parts(RingObject *self, struct outgoing *out, PyObject *parts) {
    Py_ssize_t count = PyTuple_Size(parts), most = ring_max_parts(self->end.capacity);
    if (count < 0) return -1;
    if (count < 1 || count > most) {
        PyErr_Format(PyExc_ValueError, "a record has 1 to %zd parts in this ring, not %zd", most,
                     count);
        return -1;
    }
    if (count > 1) {
        out->spans[0].data = (unsigned char *)out->table;
        out->spans[0].bytes = (uint64_t)count * sizeof(uint64_t);
        out->n_spans = 1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (add_span(out, PyTuple_GetItem(parts, i)) < 0) return -1;
    return 0;
}

/* Go on with the record that the last call has kept, or start a new one. */
static int begin_record(RingObject *self, struct outgoing *out, int resume) {
    struct ring_end *end = &self->end;
    int kept = self->kept;
    self->kept = 0;
    end->wait_started = 0;
    if (resume && kept && out->n_parts == end->at.n_parts) return 0;
    if (kept) ring_give_up(end);
    if (resume && kept) {
        PyErr_SetString(PyExc_ValueError, "this is not the record that was begun");
        return -1;
    }
    ring_start_record(end, out->spans, out->n_spans, out->n_parts);
    return 0;
}

/* A ring_status, or -1 with an exception set. `keep`: after a timeout the record stays begun. */
static int write_record(RingObject *self, struct outgoing *out, uint64_t timeout, int keep) {
    struct ring_end *end = &self->end;
    int status = RING_WOULD_BLOCK;
    self->in_use = 1;
    if (end->at.total <= RING_SMALL_BYTES) status = ring_write(end, out->spans, 0, 0);
    uint64_t deadline = status == RING_WOULD_BLOCK ? deadline_after(timeout) : 0;
    while (status == RING_WOULD_BLOCK || status == RING_INTERRUPTED) {
        if (status == RING_INTERRUPTED && PyErr_CheckSignals() < 0) {
            status = -1;
            break;
        }
        Py_BEGIN_ALLOW_THREADS
        status = ring_write(end, out->spans, deadline, 1);
        Py_END_ALLOW_THREADS
    }
    self->in_use = 0;
    self->kept = keep && status == RING_TIMEOUT;
    if (status != RING_OK && !self->kept) ring_give_up(end);
    return status;
}

static PyObject *Ring_write(PyObject *op, PyObject *const *args, Py_ssize_t nargs) {
    RingObject *self = (RingObject *)op;
    struct outgoing out; /* most of it stays untouched */
    uint64_t timeout;
    out.n_parts = out.n_spans = 0;
    if (check_count(nargs, 4) < 0 || check_usable(self, 1) < 0) return NULL;
    if (to_nanoseconds(args[1], &timeout) < 0) return NULL;
    int keep = args[2] == Py_True, resume = args[3] == Py_True, status = -1;
    int failed = PyTuple_Check(args[0]) ? add_parts(self, &out, args[0]) : add_span(&out, args[0]);
    if (!failed && begin_record(self, &out, resume) == 0)
        status = write_record(self, &out, timeout, keep);
    release_spans(&out);
    return status < 0 ? NULL : PyLong_FromLong(status);
}

/* ---- reading ---- */

static PyObject *new_part(uint64_t entry, struct ring_part *part) {
    Py_ssize_t bytes = (Py_ssize_t)(entry & ~RING_IMMUTABLE);
    int immutable = (entry & RING_IMMUTABLE) != 0;
    PyObject *object = immutable ? PyBytes_FromStringAndSize(NULL, bytes)
                                 : PyByteArray_FromStringAndSize(NULL, bytes);
    if (object == NULL) return NULL;
    char *data = immutable ? PyBytes_AsString(object) : PyByteArray_AsString(object);
    part->data = (unsigned char *)data;
    part->bytes = (uint64_t)bytes;
    return object;
}

/* Objects that will own the parts of the record that has begun. Straight from the ring into them.
 * RING_NEED_MEMORY once they are there. */
static int lend_memory(RingObject *self) {
    struct ring_end *end = &self->end;
    Py_CLEAR(self->received); /* of a record that the writer gave up */
    if (end->at.n_parts == 1) {
        self->received = new_part(end->lengths[0], &end->parts[0]);
    } else {
        self->received = PyList_New((Py_ssize_t)end->at.n_parts);
        for (uint32_t i = 0; self->received != NULL && i < end->at.n_parts; i++) {
            PyObject *part = new_part(end->lengths[i], &end->parts[i]);
            if (part == NULL || PyList_SetItem(self->received, (Py_ssize_t)i, part) < 0)
                Py_CLEAR(self->received);
        }
    }
    if (self->received == NULL && PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Clear();
        return ring_corrupt(end, "there is no memory for a record as long as it says");
    }
    if (self->received == NULL) return -1;
    end->has_memory = 1;
    return RING_NEED_MEMORY;
}

/* A ring_status, or -1 with an exception set. */
static int read_record(RingObject *self, uint64_t deadline) {
    struct ring_end *end = &self->end;
    end->wait_started = 0;
    self->in_use = 1;
    int status = RING_WOULD_BLOCK;
    if (end->at.total <= RING_SMALL_BYTES) status = ring_read(end, deadline, 0);
    for (;;) {
        if (status == RING_NEED_MEMORY)
            status = lend_memory(self);
        else if (status == RING_INTERRUPTED && PyErr_CheckSignals() < 0)
            status = -1;
        if (status != RING_NEED_MEMORY && status != RING_INTERRUPTED && status != RING_WOULD_BLOCK)
            break;
        if (status == RING_NEED_MEMORY && end->at.total <= RING_SMALL_BYTES) {
            status = ring_read(end, deadline, 0);
            continue;
        }
        Py_BEGIN_ALLOW_THREADS
        status = ring_read(end, deadline, 1);
        Py_END_ALLOW_THREADS
    }
    self->in_use = 0;
    return status;
}

static PyObject *Ring_read(PyObject *op, PyObject *const *args, Py_ssize_t nargs) {
    RingObject *self = (RingObject *)op;
    uint64_t timeout;
    if (check_count(nargs, 1) < 0 || check_usable(self, 0) < 0) return NULL;
    if (to_nanoseconds(args[0], &timeout) < 0) return NULL;
    int status = read_record(self, deadline_after(timeout));
    if (status < 0) return NULL;
    if (status != RING_OK) return PyLong_FromLong(status);
    PyObject *record = self->received;
    self->received = NULL;
    return record;
}

#endif
