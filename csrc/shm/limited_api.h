/* The limited API of Python 3.10, whatever Python's headers it is compiled with: an extension that a
 * later Python has compiled runs on 3.10, too. No format has a '#': compiled by Python 3.13 or newer,
 * such a call is an error in an older one. */
#ifndef VLLM_COMMEXT_SHM_LIMITED_API_H
#define VLLM_COMMEXT_SHM_LIMITED_API_H

#include <Python.h>

#if PY_VERSION_HEX >= 0x030C0000
/* These headers count no references of what lives for ever there, and is counted before. */
#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)
#endif

#if PY_VERSION_HEX >= 0x030D0000
/* Gone from the headers, kept in the stable ABI. */
PyAPI_FUNC(int) PyObject_AsReadBuffer(PyObject *, const void **, Py_ssize_t *);
#endif

#endif
