// Python's door to tenants, to the rule of admission and to the bandwidth of this host's memory.
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "admission.hpp"
#include "bindings.hpp"

namespace treadle::dataplane {
namespace {

using LimitsTuple = std::tuple<std::string, double, int, int64_t, int64_t>;  // as in TenantLimits
using WorkTuple = std::tuple<int64_t, int64_t, int64_t>;                      // as in Work

Digest token_digest(const std::string& bytes) {
    Digest digest;
    if (bytes.size() != digest.size()) throw py::value_error("token: a sha256 of 32 bytes expected");
    std::memcpy(digest.data(), bytes.data(), digest.size());
    return digest;
}

TenantsRef make_tenants(const std::vector<LimitsTuple>& limits, const std::vector<std::pair<py::bytes, int32_t>>& tokens) {
    std::vector<TenantLimits> made;
    for (const auto& [name, share, priority, rows, bytes] : limits) made.push_back({name, share, priority, rows, bytes});
    std::vector<std::pair<Digest, int32_t>> digests;
    for (const auto& [token, tenant] : tokens) digests.emplace_back(token_digest(token), tenant);
    return std::make_shared<Tenants>(std::move(made), std::move(digests));
}

py::dict counters_of(const Tenants& tenants, size_t index) {
    const TenantCounters now = tenants.counters(index);
    py::dict counters;
    counters["admitted"] = now.admitted;
    counters["late"] = now.late;
    counters["refused"] = now.refused;
    counters["rows"] = now.rows;
    counters["bytes"] = now.bytes;
    counters["slack"] = now.slack;
    counters["slack_seconds"] = now.slack_seconds;
    return counters;
}

Work work_of(const WorkTuple& work) { return {std::get<0>(work), std::get<1>(work), std::get<2>(work)}; }

Verdict judged(int64_t now_ns, int64_t running_ns, int workers, const WorkTuple& asked, const std::vector<WorkTuple>& admitted) {
    std::vector<Work> works;
    for (const WorkTuple& work : admitted) works.push_back(work_of(work));
    return judge({now_ns, running_ns, workers}, work_of(asked), works);
}

}  // namespace

void bind_tenants(py::module_& module) {
    py::class_<Tenants, TenantsRef>(module, "Tenants")
        .def(py::init(&make_tenants))
        .def("find", [](const Tenants& tenants, const py::bytes& token) { return tenants.find(token_digest(token)); })
        .def("take", &Tenants::take)
        .def("overloaded", &Tenants::overloaded)
        .def("count_refused", [](Tenants& tenants, int32_t tenant, int reason) { tenants.count_refused(tenant, static_cast<Reason>(reason)); })
        .def("count_served", [](Tenants& tenants, int32_t tenant, int tier, int64_t rows, int64_t bytes, int64_t slack_ns) {
            tenants.count_served(tenant, static_cast<Tier>(tier), rows, bytes, slack_ns);
        })
        .def("counters", &counters_of);
    module.def("judge", &judged);
    module.def("measure_copy_bandwidth", &measure_copy_bandwidth, py::call_guard<py::gil_scoped_release>());
}

}  // namespace treadle::dataplane
