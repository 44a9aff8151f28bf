// Python's door to rows on a disk and the threads that wait for it.
#include <unistd.h>

#include <memory>

#include "bindings.hpp"
#include "disk_rows.hpp"

namespace treadle::dataplane {
namespace {

// A forked child has no threads to join: it leaks its copy.
std::shared_ptr<DiskReaders> make_readers(int threads) {
    const pid_t made_in = ::getpid();
    return {new DiskReaders(threads), [made_in](DiskReaders* readers) {
                const py::gil_scoped_release nogil;
                if (::getpid() == made_in) delete readers;
            }};
}

py::dict stats_of(const DiskRows& rows) {
    py::dict stats;
    stats["rows_total"] = rows.totals().rows.load();
    stats["reads_total"] = rows.totals().runs.load();
    stats["waits_total"] = rows.totals().waited.load();
    stats["bytes_total"] = rows.totals().bytes.load();
    return stats;
}

}  // namespace

void bind_disk(py::module_& module) {
    py::class_<DiskReaders, std::shared_ptr<DiskReaders>>(module, "DiskReaders").def(py::init(&make_readers));
    py::class_<DiskRows, RowStore, std::shared_ptr<DiskRows>>(module, "DiskRows")
        .def(py::init([](int fd, int64_t offset, int64_t row_count, int64_t row_bytes, const py::object& held, std::shared_ptr<DiskReaders> readers) {
            return std::make_shared<DiskRows>(fd, offset, row_count, row_bytes, ranges_of(held), std::move(readers));
        }))
        .def("stats", &stats_of);
}

}  // namespace treadle::dataplane
