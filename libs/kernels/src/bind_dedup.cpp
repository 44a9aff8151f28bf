// Python's door to the ids without repeats.
#include <new>

#include "../include/treadle/kernels/dedup.hpp"
#include "arrays.hpp"

namespace py = pybind11;
namespace tk = treadle::kernels;

namespace {

int64_t unique_rows(const Array<int64_t>& rows, Array<int64_t>& unique, Array<int32_t>& inverse) {
    const int64_t count = rows.size();
    require(count <= tk::DEDUP_ROWS_MAX && unique.size() == count && inverse.size() == count, "rows, unique, inverse");
    const int64_t* const ids = rows.data();
    int64_t* const different = unique.mutable_data();
    int32_t* const where = inverse.mutable_data();
    int64_t found = 0;
    {
        const py::gil_scoped_release released;
        found = tk::unique_rows(ids, count, different, where);
    }
    if (found < 0) throw std::bad_alloc();
    return found;
}

void spread(const Array<uint8_t>& fetched, const Array<int32_t>& inverse, Array<uint8_t>& out) {
    require(fetched.ndim() == 2 && out.size() == inverse.size() * fetched.shape(1), "fetched, inverse, out");
    const auto* const source = reinterpret_cast<const std::byte*>(fetched.data());
    const int32_t* const where = inverse.data();
    const int64_t count = inverse.size();
    const int64_t row_bytes = fetched.shape(1);
    auto* const target = reinterpret_cast<std::byte*>(out.mutable_data());
    const py::gil_scoped_release released;
    tk::spread(source, row_bytes, where, count, target);
}

}  // namespace

void bind_dedup(py::module_& module) {
    module.def("unique_rows", &unique_rows, exact("rows"), exact("unique"), exact("inverse"));
    module.def("spread", &spread, exact("fetched"), exact("inverse"), exact("out"));
}
