// Python's door to the prefetch distance: read it, set it, time a gather at another one.
#include <chrono>

#include "../include/treadle/kernels/gather.hpp"
#include "../include/treadle/kernels/guard.hpp"
#include "arrays.hpp"

namespace py = pybind11;
namespace tk = treadle::kernels;

namespace {

void set_prefetch_rows(int64_t ahead) {
    require(1 <= ahead && ahead <= tk::PREFETCH_ROWS_MAX, "ahead");
    tk::prefetch_rows.store(ahead, std::memory_order_relaxed);
}

// Nanoseconds of one gather; -1 if a page of the table could not be read.
int64_t time_gather(const Array<uint8_t>& table, const Array<int64_t>& rows, Array<uint8_t>& out, int64_t ahead) {
    require(table.ndim() == 2 && out.size() == rows.size() * table.shape(1), "table, rows, out");
    require(1 <= ahead && ahead <= tk::PREFETCH_ROWS_MAX, "ahead");
    require(tk::first_out_of_range(rows.data(), rows.size(), table.shape(0)) < 0, "rows");
    const auto* const source = reinterpret_cast<const std::byte*>(table.data());
    const auto bytes = static_cast<size_t>(table.size());
    const int64_t* const ids = rows.data();
    auto* const target = reinterpret_cast<std::byte*>(out.mutable_data());
    const int64_t count = rows.size();
    const int64_t row_bytes = table.shape(1);
    const py::gil_scoped_release released;
    const auto begun = std::chrono::steady_clock::now();
    if (!tk::guarded(source, bytes, [=] { tk::gather(source, row_bytes, ids, count, target, ahead); })) return -1;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begun).count();
}

}  // namespace

void bind_prefetch(py::module_& module) {
    module.attr("PREFETCH_ROWS") = tk::PREFETCH_ROWS;
    module.attr("PREFETCH_ROWS_MAX") = tk::PREFETCH_ROWS_MAX;
    module.def("prefetch_rows", [] { return tk::prefetch_rows.load(std::memory_order_relaxed); });
    module.def("set_prefetch_rows", &set_prefetch_rows, py::arg("ahead"));
    module.def("time_gather", &time_gather, exact("table"), exact("rows"), exact("out"), py::arg("ahead"));
}
