// What every binding file needs: arrays of one exact dtype, and a check that speaks Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// noconvert: an array of another dtype or layout is refused, never copied behind the caller's back
inline pybind11::arg exact(const char* name) { return pybind11::arg(name).noconvert(); }
