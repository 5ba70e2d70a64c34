/*
 * Columns of a step: lists of integers and of names as int32, only where they are exactly that.
 */
#ifndef VLLM_COMMEXT_SHM_COLUMNS_H
#define VLLM_COMMEXT_SHM_COLUMNS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* 1 and the number, 0 if it is no int of 32 bits, -1 with an exception set. */
static inline int column_number(PyObject *item, int32_t *number) {
    int overflow;
    if (!PyLong_CheckExact(item)) return 0;
    long value = PyLong_AsLongAndOverflow(item, &overflow);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (overflow || value < INT32_MIN || value > INT32_MAX) return 0;
    *number = (int32_t)value;
    return 1;
}

/* Fill `to` with the list's numbers. 1, 0 or -1 as column_number. */
static inline int column_fill(PyObject *list, Py_ssize_t count, int32_t *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        int is_number = column_number(PyList_GetItem(list, i), &to[i]);
        if (is_number != 1) return is_number;
    }
    return 1;
}

static PyObject *column_give_up(PyObject *column, int status) {
    Py_XDECREF(column);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

/* pack_ints(list, count) -> that int if all are the same, else bytes; None for anything else. */
static PyObject *columns_pack_ints(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *list;
    Py_ssize_t count, differ = 1;
    if (!PyArg_ParseTuple(args, "On", &list, &count)) return NULL;
    if (!PyList_CheckExact(list) || PyList_Size(list) != count || count == 0) Py_RETURN_NONE;
    PyObject *column = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t));
    if (column == NULL) return NULL;
    int32_t *numbers = (int32_t *)(void *)PyBytes_AsString(column);
    int status = column_fill(list, count, numbers);
    if (status != 1) return column_give_up(column, status);
    while (differ < count && numbers[differ] == numbers[0]) differ++;
    if (differ < count) return column;
    PyObject *same = PyLong_FromLong(numbers[0]);
    Py_DECREF(column);
    return same;
}

/* unpack_ints(bytes) -> list */
static PyObject *columns_unpack_ints(PyObject *Py_UNUSED(module), PyObject *column) {
    char *data;
    Py_ssize_t bytes;
    if (PyBytes_AsStringAndSize(column, &data, &bytes) < 0) return NULL;
    Py_ssize_t count = bytes / (Py_ssize_t)sizeof(int32_t);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        int32_t number;
        memcpy(&number, data + i * (Py_ssize_t)sizeof number, sizeof number);
        PyObject *item = PyLong_FromLong(number);
        if (item == NULL || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
    }
    return list;
}

/* pack_singles(list, count) -> bytes of the numbers of a list of lists of one each; else None. */
static PyObject *columns_pack_singles(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *list;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "On", &list, &count)) return NULL;
    if (!PyList_CheckExact(list) || PyList_Size(list) != count || count == 0) Py_RETURN_NONE;
    PyObject *column = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t));
    if (column == NULL) return NULL;
    int32_t *numbers = (int32_t *)(void *)PyBytes_AsString(column);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *row = PyList_GetItem(list, i);
        int status = PyList_CheckExact(row) && PyList_Size(row) == 1
                         ? column_fill(row, 1, &numbers[i]) : 0;
        if (status != 1) return column_give_up(column, status);
    }
    return column;
}

/* unpack_singles(bytes) -> list of lists */
static PyObject *columns_unpack_singles(PyObject *Py_UNUSED(module), PyObject *column) {
    char *data;
    Py_ssize_t bytes;
    if (PyBytes_AsStringAndSize(column, &data, &bytes) < 0) return NULL;
    Py_ssize_t count = bytes / (Py_ssize_t)sizeof(int32_t);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        int32_t number;
        memcpy(&number, data + i * (Py_ssize_t)sizeof number, sizeof number);
        PyObject *row = PyList_New(1), *item = PyLong_FromLong(number);
        if (row == NULL || item == NULL || PyList_SetItem(row, 0, item) < 0) {
            Py_XDECREF(row);
            Py_CLEAR(list);
        } else if (PyList_SetItem(list, i, row) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* same_names(one, other) -> whether both are lists of the same exact strings in the same order. The
 * other is known to hold nothing else. */
static PyObject *columns_same_names(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *one, *other;
    if (!PyArg_ParseTuple(args, "OO", &one, &other)) return NULL;
    if (!PyList_CheckExact(one) || PyList_Size(one) != PyList_Size(other)) Py_RETURN_FALSE;
    Py_ssize_t count = PyList_Size(one);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *mine = PyList_GetItem(one, i), *theirs = PyList_GetItem(other, i);
        if (mine == theirs) continue;
        if (!PyUnicode_CheckExact(mine) || PyUnicode_Compare(mine, theirs) != 0) {
            if (PyErr_Occurred()) return NULL;
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

/* pack_names(list, numbers, fresh) -> bytes with the number of each name; None unless all are exactly
 * strings. Names that `numbers` lacks get the next one and are appended to `fresh`. */
static PyObject *columns_pack_names(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *list, *numbers, *fresh;
    if (!PyArg_ParseTuple(args, "OO!O!", &list, &PyDict_Type, &numbers, &PyList_Type, &fresh))
        return NULL;
    if (!PyList_CheckExact(list)) Py_RETURN_NONE;
    Py_ssize_t count = PyList_Size(list);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyUnicode_CheckExact(PyList_GetItem(list, i))) Py_RETURN_NONE;
    PyObject *column = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int32_t));
    if (column == NULL) return NULL;
    int32_t *to = (int32_t *)(void *)PyBytes_AsString(column);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyList_GetItem(list, i);
        PyObject *number = PyDict_GetItemWithError(numbers, name);
        int failed = number == NULL && PyErr_Occurred();
        if (number != NULL) {
            failed = column_number(number, &to[i]) != 1;
        } else if (!failed) {
            to[i] = (int32_t)PyDict_Size(numbers);
            number = PyLong_FromLong(to[i]);
            failed = number == NULL || PyDict_SetItem(numbers, name, number) < 0 ||
                     PyList_Append(fresh, name) < 0;
            Py_XDECREF(number);
        }
        if (failed) return column_give_up(column, -1);
    }
    return column;
}

/* unpack_names(bytes, names) -> list of these names. Raises IndexError for one that is not there. */
static PyObject *columns_unpack_names(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *column, *names;
    char *data;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "OO!", &column, &PyList_Type, &names)) return NULL;
    if (PyBytes_AsStringAndSize(column, &data, &bytes) < 0) return NULL;
    Py_ssize_t count = bytes / (Py_ssize_t)sizeof(int32_t);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        int32_t number;
        memcpy(&number, data + i * (Py_ssize_t)sizeof number, sizeof number);
        PyObject *name = PyList_GetItem(names, number); /* borrowed; NULL out of range */
        if (name != NULL) Py_INCREF(name);
        if (name == NULL || PyList_SetItem(list, i, name) < 0) Py_CLEAR(list);
    }
    return list;
}

/* is_index(dict, list) -> whether it maps each name of the list, in this order, to its place. The list
 * is known to hold nothing but exact strings. */
static PyObject *columns_is_index(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *dict, *list, *key, *value;
    Py_ssize_t at = 0;
    if (!PyArg_ParseTuple(args, "OO!", &dict, &PyList_Type, &list)) return NULL;
    if (!PyDict_CheckExact(dict) || PyDict_Size(dict) != PyList_Size(list)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; PyDict_Next(dict, &at, &key, &value); i++) {
        PyObject *name = PyList_GetItem(list, i);
        int32_t place;
        int is_number = column_number(value, &place);
        if (is_number < 0) return NULL;
        if (!is_number || place != i) Py_RETURN_FALSE;
        if (key == name) continue;
        if (!PyUnicode_CheckExact(key) || PyUnicode_Compare(key, name) != 0) {
            if (PyErr_Occurred()) return NULL;
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

#endif
