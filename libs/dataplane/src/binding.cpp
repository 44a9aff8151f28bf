// The extension module: each part of the data plane binds itself.
#include <cerrno>
#include <system_error>

#include "bindings.hpp"

namespace treadle::dataplane {
namespace {

void raise_os_error(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
    }
}

}  // namespace
}  // namespace treadle::dataplane

PYBIND11_MODULE(_native, module) {
    using namespace treadle::dataplane;
    py::register_exception_translator(raise_os_error);
    bind_rows(module);
    bind_tenants(module);
    bind_queue(module);
    bind_versions(module);
    bind_ring(module);
    bind_cache(module);
    bind_disk(module);
    bind_socket(module);
}
