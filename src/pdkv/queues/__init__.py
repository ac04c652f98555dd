"""What the schedulers of a prefill and a decode engine hold, stage by stage, and who comes in."""

from pdkv.queues.admission import AdmissionPlan, Resources, Waiting, plan_admission

__all__ = ["AdmissionPlan", "Resources", "Waiting", "plan_admission"]
