// Python's door to row stores: where the rows of one table lie.
#include <vector>

#include "bindings.hpp"

namespace treadle::dataplane {
namespace {

RowStoreRef memory_rows(const py::object& table, const py::object& held) {
    const py::array rows = borrow<uint8_t>(table, "table");
    return std::make_shared<MemoryRows>(static_cast<const std::byte*>(rows.data()), rows.shape(0), rows.shape(1), ranges_of(held));
}

}  // namespace

void bind_rows(py::module_& module) {
    py::class_<RowStore, RowStoreRef>(module, "RowStore")
        .def_readonly("row_count", &RowStore::row_count)
        .def_readonly("row_bytes", &RowStore::row_bytes);
    module.def("memory_rows", &memory_rows, py::arg("table"), py::arg("held"), py::keep_alive<0, 1>());
}

}  // namespace treadle::dataplane
