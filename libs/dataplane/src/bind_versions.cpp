// Python's door to what the native doors of a pool serve: publish, withdraw, and ask whether a request still reads.
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "versions.hpp"

namespace treadle::dataplane {
namespace {

using LayerTuple = std::tuple<int32_t, py::object, RowStoreRef>;  // number, HashPlan, rows

void publish(Versions& versions, const py::bytes& digest, const py::bytes& fingerprint, const std::vector<LayerTuple>& layers) {
    auto version = std::make_shared<Version>();
    version->digest = digest_of(digest, "digest");
    version->fingerprint = digest_of(fingerprint, "fingerprint");
    for (const auto& [number, plan, rows] : layers) {
        if (plan.attr("rows_hashed").cast<int64_t>() > rows->row_count) throw py::value_error("rows: the hash reaches further than the table");
        version->layers.push_back({number, std::make_shared<Plan>(view_of_plan(plan)), rows});
    }
    versions.publish(std::move(version));
}

// Out of sight. Kept until no request has it: `read` says so.
struct Withdrawn {
    VersionRef version;
    bool read() const { return version.use_count() > 1; }
};

py::object withdraw(Versions& versions, const py::bytes& digest) {
    VersionRef version = versions.retire(digest_of(digest, "digest"));
    return version ? py::cast(Withdrawn{std::move(version)}) : py::none();
}

}  // namespace

void bind_versions(py::module_& module) {
    py::class_<Withdrawn>(module, "Withdrawn").def_property_readonly("read", &Withdrawn::read);
    py::class_<Versions, std::shared_ptr<Versions>>(module, "Versions")
        .def(py::init<>())
        .def("publish", &publish)
        .def("withdraw", &withdraw);
}

}  // namespace treadle::dataplane
