/* vllm_commext.shm._shm_ring: the byte ring of core.h as a Python type, for the limited API of
 * Python 3.10, so one binary serves every later Python. */
#include "records.h"
#include "step_pack.h"
#include "step_unpack.h"

#include <pthread.h>
#include <sys/mman.h>

static struct ring_end *open_ends; /* of this process; changed under the interpreter's lock */

static void remember_end(struct ring_end *end) {
    end->next_open = open_ends;
    open_ends = end;
}

static void forget_end(struct ring_end *end) {
    struct ring_end **link = &open_ends;
    while (*link != end) link = &(*link)->next_open;
    *link = end->next_open;
    close(end->waiter.fd);
}

/* The child owns none of the ends, and must not keep the parent's alive. */
static void ring_after_fork(void) {
    ring_generation++;
    for (; open_ends != NULL; open_ends = open_ends->next_open) close(open_ends->waiter.fd);
}

/* ---- the meeting of writer and readers ---- */

static PyObject *wait_for(RingObject *self, struct ring_wish wish, PyObject *timeout) {
    uint64_t nanoseconds;
    if (to_nanoseconds(timeout, &nanoseconds) < 0) return NULL;
    uint64_t deadline = deadline_after(nanoseconds);
    int status = RING_INTERRUPTED;
    self->end.wait_started = 0;
    self->in_use = 1;
    self->end.culprit = RING_WRITER;
    while (status == RING_INTERRUPTED && PyErr_CheckSignals() == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = ring_wait(&self->end.waiter, &wish, &self->end.wait_started, deadline);
        Py_END_ALLOW_THREADS
        if (status == RING_INTERRUPTED && self->end.rank == RING_WRITER &&
            ring_find_lost_reader(&self->end, UINT64_MAX)) {
            self->end.culprit = self->end.lost_reader;
            status = RING_PEER_DEAD;
        }
    }
    self->in_use = 0;
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLong(status);
}

static PyObject *Ring_wait_attached(PyObject *op, PyObject *timeout) {
    RingObject *self = (RingObject *)op;
    if (check_usable(self, 1) < 0) return NULL;
    struct ring_meeting *meeting = &self->end.segment->meeting;
    struct ring_wish wish = {.cursor = &meeting->attached, .event = &meeting->event,
                             .target = self->end.n_readers};
    return wait_for(self, wish, timeout);
}

static PyObject *Ring_announce_ready(PyObject *op, PyObject *Py_UNUSED(ignored)) {
    RingObject *self = (RingObject *)op;
    if (check_usable(self, 1) < 0) return NULL;
    struct ring_meeting *meeting = &self->end.segment->meeting;
    ring_advance(&self->end.waiter, &meeting->ready, 1, &meeting->event, NULL);
    Py_RETURN_NONE;
}

static PyObject *Ring_wait_ready(PyObject *op, PyObject *timeout) {
    RingObject *self = (RingObject *)op;
    if (check_usable(self, 0) < 0) return NULL;
    struct ring_meeting *meeting = &self->end.segment->meeting;
    struct ring_wish wish = {.cursor = &meeting->ready, .event = &meeting->event, .target = 1,
                             .peer = &self->end.segment->writer, .peer_rank = RING_WRITER};
    return wait_for(self, wish, timeout);
}

/* ---- ending ---- */

static PyObject *Ring_cancel(PyObject *op, PyObject *Py_UNUSED(ignored)) {
    RingObject *self = (RingObject *)op;
    if (self->process != ring_generation) Py_RETURN_NONE; /* a forked child changes nothing */
    Py_BEGIN_ALLOW_THREADS
    ring_cancel(&self->end.waiter);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Ring_leave(PyObject *op, PyObject *Py_UNUSED(ignored)) {
    RingObject *self = (RingObject *)op;
    if (self->process == ring_generation) ring_leave(&self->end);
    Py_RETURN_NONE;
}

static PyObject *Ring_predict(PyObject *op, PyObject *value) {
    int on = PyObject_IsTrue(value);
    if (on < 0) return NULL;
    ((RingObject *)op)->end.waiter.predicts = on;
    Py_RETURN_NONE;
}

/* ---- what can be observed ---- */

static PyObject *Ring_counters(PyObject *op, PyObject *Py_UNUSED(ignored)) {
    struct ring_end *end = &((RingObject *)op)->end;
    uint64_t high_water = 0, least = UINT64_MAX;
    unsigned slowest = 0;
    if (((RingObject *)op)->process != ring_generation) return PyDict_New();
    for (uint32_t rank = 0; rank < end->n_readers; rank++) {
        struct ring_cursor *cursor = &end->readers[rank].cursor;
        uint64_t position = atomic_load_explicit(&cursor->position, memory_order_relaxed);
        uint64_t high = atomic_load_explicit(&cursor->high_water, memory_order_relaxed);
        if (high > high_water) high_water = high;
        if (position < least) {
            least = position;
            slowest = rank;
        }
    }
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:I}", "messages", (unsigned long long)end->sequence,
                         "bytes", (unsigned long long)end->bytes, "waits",
                         (unsigned long long)end->waiter.waits, "sleeps",
                         (unsigned long long)end->waiter.sleeps, "wake_ups",
                         (unsigned long long)end->waiter.wake_ups, "foreseen",
                         (unsigned long long)end->waiter.foreseen, "spilled_bytes",
                         (unsigned long long)end->spills.bytes, "high_water_bytes",
                         (unsigned long long)high_water, "slowest_reader", slowest);
}

static PyObject *describe(const struct ring_end *end, int rank) {
    const struct ring_identity *who =
        rank == RING_WRITER ? &end->segment->writer : &end->readers[rank].identity;
    const struct ring_cursor *cursor =
        rank == RING_WRITER ? &end->segment->head : &end->readers[rank].cursor;
    unsigned state = atomic_load_explicit(&who->state, memory_order_acquire);
    int dead = state == RING_ATTACHED && rank != end->rank &&
               ring_is_dead(end->waiter.fd, who, rank);
    return Py_BuildValue(
        "(iIINKKK)", rank, state, (unsigned)who->pid, PyBool_FromLong(!dead),
        (unsigned long long)atomic_load_explicit(&cursor->sequence, memory_order_relaxed),
        (unsigned long long)atomic_load_explicit(&cursor->position, memory_order_relaxed),
        (unsigned long long)atomic_load_explicit(&cursor->high_water, memory_order_relaxed));
}

static PyObject *Ring_peers(PyObject *op, PyObject *Py_UNUSED(ignored)) {
    struct ring_end *end = &((RingObject *)op)->end;
    if (((RingObject *)op)->process != ring_generation) return PyList_New(0);
    PyObject *list = PyList_New((Py_ssize_t)end->n_readers + 1);
    for (int i = 0; list != NULL && i <= (int)end->n_readers; i++) {
        PyObject *peer = describe(end, i - 1);
        if (peer == NULL || PyList_SetItem(list, i, peer) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *Ring_failure(PyObject *op, PyObject *Py_UNUSED(ignored)) {
    struct ring_end *end = &((RingObject *)op)->end;
    return Py_BuildValue("(iz)", end->culprit, end->why);
}

/* ---- opening an end ---- */

static int open_end(RingObject *self, int fd, unsigned long long map_bytes,
                    unsigned long long capacity, unsigned n_readers, int rank,
                    const unsigned char *nonce) {
    int protection = PROT_READ | PROT_WRITE, own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    void *map = MAP_FAILED;
    if (own_fd >= 0)
        map = mmap(NULL, (size_t)map_bytes, protection, MAP_SHARED | MAP_POPULATE, own_fd, 0);
    if (map == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (own_fd >= 0) close(own_fd);
        return -1;
    }
    /* A mapping keeps the file open, and so the lock: a child must not have it. */
    madvise(map, (size_t)map_bytes, MADV_DONTFORK);
    ring_open(&self->end, own_fd, map, map_bytes, capacity, n_readers, rank);
    self->process = ring_generation;
    const char *why = NULL;
    if (rank == RING_WRITER)
        ring_format(&self->end, nonce);
    else
        why = ring_bad_header(&self->end.segment->header, capacity, n_readers, map_bytes, nonce);
    if (why == NULL && rank != RING_WRITER && !ring_claim(&self->end))
        why = "this reader's place is taken already";
    if (why == NULL) {
        remember_end(&self->end);
        return 0;
    }
    munmap(map, (size_t)map_bytes);
    close(own_fd);
    self->end.segment = NULL;
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

/* Ring(fd, map_bytes, capacity, n_readers, rank, nonce, budget): rank -1 formats the segment as its
 * writer, any other claims that reader's place. The end keeps a duplicate of the descriptor. */
static PyObject *Ring_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    int fd, rank;
    unsigned long long map_bytes, capacity, budget;
    unsigned n_readers;
    PyObject *nonce;
    if (!PyArg_ParseTuple(args, "iKKIiSK", &fd, &map_bytes, &capacity, &n_readers, &rank, &nonce, &budget))
        return NULL;
    const char *why = ring_bad_shape(capacity, n_readers, map_bytes);
    if (why == NULL && (rank < RING_WRITER || rank >= (int)n_readers))
        why = "the rank must be -1 (the writer) or that of a reader";
    if (why == NULL && PyBytes_Size(nonce) != RING_NONCE_BYTES) why = "the nonce must have 16 bytes";
    if (why != NULL) return PyErr_SetString(PyExc_ValueError, why), NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    RingObject *self = (RingObject *)allocate(type, 0);
    if (self == NULL) return NULL;
    const unsigned char *bytes = (const unsigned char *)PyBytes_AsString(nonce);
    if (open_end(self, fd, map_bytes, capacity, n_readers, rank, bytes) < 0)
        Py_CLEAR(self);
    else if (rank == RING_WRITER)
        ring_set_budget(&self->end, budget);
    return (PyObject *)self;
}

static void Ring_dealloc(PyObject *op) {
    RingObject *self = (RingObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    Py_CLEAR(self->received);
    if (self->end.segment != NULL && self->process == ring_generation) {
        ring_leave(&self->end);
        forget_end(&self->end);
        munmap(self->end.segment, (size_t)self->end.map_bytes);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    Py_DECREF(type);
}

/* ---- module ---- */

/* create_file(path, bytes) -> descriptor */
static PyObject *module_create_file(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *path;
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "sK", &path, &bytes)) return NULL;
    int fd = ring_create_file(path, bytes);
    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

static PyObject *module_remove_abandoned(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
    return PyBool_FromLong(ring_remove_abandoned(path));
}

#define FAST(name) ((PyCFunction)(void (*)(void))(name))

static PyMethodDef ring_methods[] = {
    {"write", FAST(Ring_write), METH_FASTCALL, "write(parts, timeout, keep, resume) -> status"},
    {"read", FAST(Ring_read), METH_FASTCALL, "read(timeout) -> bytes, list of parts, or status"},
    {"wait_attached", Ring_wait_attached, METH_O, "wait_attached(timeout) -> status"},
    {"announce_ready", Ring_announce_ready, METH_NOARGS, "announce_ready()"},
    {"wait_ready", Ring_wait_ready, METH_O, "wait_ready(timeout) -> status"},
    {"cancel", Ring_cancel, METH_NOARGS, "cancel(): end every wait of this end, now and later"},
    {"leave", Ring_leave, METH_NOARGS, "leave(): tell the others that this end is gone"},
    {"predict", Ring_predict, METH_O,
     "predict(on): spin for waits whose end is foreseen; by itself with four processors or more"},
    {"counters", Ring_counters, METH_NOARGS, "counters() -> dict, of this end"},
    {"peers", Ring_peers, METH_NOARGS,
     "peers() -> [(rank, state, pid, alive, sequence, position, high_water)], the writer first; like "
     "counters() empty in a forked child"},
    {"failure", Ring_failure, METH_NOARGS, "failure() -> (rank of the culprit, what is corrupt)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_doc, (void *)"One end of a byte ring in shared memory."},
    {Py_tp_new, (void *)Ring_new},
    {Py_tp_dealloc, (void *)Ring_dealloc},
    {Py_tp_methods, ring_methods},
    {0, NULL},
};

static PyType_Spec ring_spec = {
    .name = "vllm_commext.shm._shm_ring.Ring",
    .basicsize = sizeof(RingObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = ring_slots,
};

static PyMethodDef module_methods[] = {
    {"create_file", module_create_file, METH_VARARGS,
     "create_file(path, num_bytes) -> descriptor of a new file, reserved and locked as its writer's"},
    {"remove_abandoned", module_remove_abandoned, METH_VARARGS,
     "remove_abandoned(path) -> whether no writer had locked it, and it is gone"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef ring_module = {
    PyModuleDef_HEAD_INIT, "_shm_ring", "A byte ring in shared memory.", -1, module_methods,
    NULL, NULL, NULL, NULL,
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddObject(module, name, type) == 0) return 0;
    Py_XDECREF(type);
    return -1;
}

PyMODINIT_FUNC PyInit__shm_ring(void) {
    PyObject *module = PyModule_Create(&ring_module);
    if (module == NULL) return NULL;
    if (add_type(module, "Ring", &ring_spec) < 0 || add_type(module, "Packer", &packer_spec) < 0 ||
        add_type(module, "Unpacker", &unpacker_spec) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    pthread_atfork(NULL, NULL, ring_after_fork);
    PyModule_AddIntConstant(module, "VERSION", RING_VERSION);
    PyModule_AddIntConstant(module, "MAX_PARTS", RING_MAX_PARTS);
    PyModule_AddIntConstant(module, "STEP_FORMAT", STEP_FORMAT);
    PyModule_AddIntConstant(module, "STEP_NO_SLOT", STEP_NO_SLOT);
    return module;
}
